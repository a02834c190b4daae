"""The report of one notebook cell: as text and as an HTML fragment without scripts.

`document.py` has the parts that both draw, `words.py` the sentences.
"""
