"""What `memtriage snapshot` does: a PyTorch memory snapshot loaded, replayed, accounted for and judged.

`read.py` has the steps in order; a rule for a new kind of finding is a file, listed in `rules.py`.
"""
