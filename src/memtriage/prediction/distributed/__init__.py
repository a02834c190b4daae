"""One rank of a job of many, traced without the others.

Process groups, collectives and what NCCL takes outside PyTorch's allocator.
"""
