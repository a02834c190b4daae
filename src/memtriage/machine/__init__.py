"""What `memtriage doctor` checks on a machine: versions, devices, limits, settings, what torch can show.

`check.py` has the checks in order. Functions that judge get what was read, so tests need no GPU.
"""
