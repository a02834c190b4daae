"""memtriage in notebooks and in IPython: `%load_ext memtriage`, then `%%memtriage` in a cell's first line.

`extension.py` has the magics, `watched_cell.py` one execution of a cell.
"""
