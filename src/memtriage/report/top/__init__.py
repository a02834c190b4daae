"""A run in progress: the live screen of `memtriage top`, and its plain table.

`words.py` has the columns and sentences that both use.
"""
