"""The CUDA caching allocator: the replay of recorded traces, and a simulator that is exact to the byte.

Nothing here needs a GPU.
"""
