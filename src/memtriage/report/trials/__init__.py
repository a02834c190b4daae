"""The report of A/B trials on the terminal; `words.py` has its sentences."""
