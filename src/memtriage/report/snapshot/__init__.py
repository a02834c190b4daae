"""The report of a memory snapshot: terminal, JSON, HTML page.

`words.py` has the names and colors of owners and pools.
"""
