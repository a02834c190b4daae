"""A census of another process: `memtriage census --pid`, `memtriage run --listen`, injection.

`ask.py` and `inject.py` are the asking side, the rest runs inside the process that is asked.
"""
