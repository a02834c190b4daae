"""Remedies: what memtriage can do about memory.

Everything is reversible, and after a failure all values are as before.
"""
