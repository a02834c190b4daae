"""The report of a memory snapshot: terminal, JSON, HTML page, what-if.

`words.py` has the names and colors of owners and pools.
"""
