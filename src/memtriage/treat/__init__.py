"""Remedies: what memtriage can do about memory, once it is known where it is."""
