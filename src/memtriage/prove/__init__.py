"""A/B trials: the same job under named variants, in fresh processes, and what the marks prove.

`trials.py` reads the file, `campaign.py` runs it, `judge.py` decides. See `docs/compare.md`.
"""
