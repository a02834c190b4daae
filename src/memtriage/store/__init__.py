"""The run directory: append-only records, one per rank, read back whole or followed live.

What a line of a record holds is in `records.py`, where files are in `layout.py`.
"""
