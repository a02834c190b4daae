"""The run directory: append-only records, one a rank, read back whole or by SQL."""
