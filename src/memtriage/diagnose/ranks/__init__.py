"""Compare and merge the ranks of a run: groups, outliers, ranks that were killed, a run in progress.

It only reads records, and works the same for one rank and for thousands.
"""
