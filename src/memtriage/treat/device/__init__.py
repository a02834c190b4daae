"""The operations on a device that remedies are made of: a protocol, for CUDA and for a simulation.

The simulation serves dry runs and tests.
"""
