"""The report of a watched run: on the terminal, as JSON and as an HTML page.

`words.py` has the sentences that all of them use.
"""
