"""The CUDA caching allocator: the replay of recorded traces, and a simulator that is exact to the byte.

No GPU is needed for anything in here.
"""
