"""The run directory: append-only records, one per rank, read back whole, followed live, or queried by SQL.

What a line of a record holds is in `records.py`, where files are in `layout.py`.
"""
