"""Remedies: what memtriage can do about memory once it is known where it is.

Everything is reversible, and a failure leaves all values as they were.
"""
