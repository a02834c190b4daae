"""memtriage inside the tools that people already have. Each file is thin.

Nothing in here is imported before the framework is.
"""
