"""Buffers that CUDA kernels allocate for themselves while they run: one file a family of operators."""
