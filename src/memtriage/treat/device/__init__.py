"""The operations on a device that remedies use: a protocol, implemented for CUDA and by a simulation.

The simulation is for dry runs and tests.
"""
