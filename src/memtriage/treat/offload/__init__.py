"""`OffloadedAdamW`: AdamW with its state on the host, at 12 bytes per parameter. See `docs/offload.md`.

`optimizer.py` is what users call, `engine.py` works on tiles, `pipeline.py` moves them.
"""
