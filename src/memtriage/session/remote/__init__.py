"""Take a census of another process: `memtriage census --pid`, `memtriage run --listen`.

`ask.py` runs in the requesting process, the rest inside the process that is asked.
"""
