"""The peak memory of a training step without a GPU: the program is traced with tensors that have no data.

`api.py` has the steps in order: trace, lifetimes, the allocator's simulator, the owners of the peak.
"""
