"""The report of A/B trials: on the terminal and as an HTML page.

`words.py` has the sentences that both use.
"""
