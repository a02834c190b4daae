"""The ranks of a run compared and merged: groups, outliers, ranks that were killed, a run in progress.

Reads records only; works the same for one rank and for thousands.
"""
