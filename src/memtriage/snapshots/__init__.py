"""What `memtriage snapshot` does: a snapshot loaded, replayed, accounted for and judged (`read.py`)."""
