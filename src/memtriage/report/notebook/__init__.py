"""The report of one notebook cell: as text and as an HTML fragment without scripts.

`words.py` has the sentences that both use.
"""
