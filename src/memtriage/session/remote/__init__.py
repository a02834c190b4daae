"""Take a census of another process: `memtriage census --pid`, `memtriage run --listen`, injection.

`ask.py` and `inject.py` run in the requesting process, the rest inside the process that is asked.
"""
