"""Parking: move storages to the host and back, with their device memory free meanwhile. See `docs/park.md`.

`api.py` is what users call, `transfer.py` moves the bytes, `guard.py` refuses the use of a parked tensor.
"""
