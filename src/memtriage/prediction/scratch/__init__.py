"""Buffers that CUDA kernels allocate for themselves while they run: one file per family of kernels.

`table.py` says which operator has which.
"""
