"""Known holders: how a library's caches are found, when they may be cleared, and what clears them.

Entries are data (`entry.Holder`); a library is never imported to look for it. They make `docs/holders.md`.
"""
