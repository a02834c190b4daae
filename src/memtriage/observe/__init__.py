"""Sources of facts, one file each: CUDA's allocator, the driver, the host, malloc, tensors, frames, heap.

This folder only reads. It decides nothing and changes nothing, except for hooks that are removed again.
"""
