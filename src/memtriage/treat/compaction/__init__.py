"""Compaction: move the few live storages that strand mostly empty segments. See `docs/compact.md`.

`one_device.py` has the steps in order: look, plan, move. `driver_thread.py` makes the driver calls meanwhile.
"""
