"""A run in progress, as `memtriage top` shows it: `words.py` has its columns and sentences."""
