"""Plain data that every other folder exchanges: marks, census, ledger, findings, holder paths, results.

No torch, no input or output, no decisions. Unknown is None, sizes are bytes.
"""
