"""The operations on a device that remedies are made of: a protocol, with CUDA or a simulation behind it.

The simulation serves dry runs and tests.
"""
