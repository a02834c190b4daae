"""Runs a trace in a child process whose writes are discarded and whose network is off.

`call.py` is the caller's side, `child.py` the child's; `protection.py` chooses among what the system offers.
"""
