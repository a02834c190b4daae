"""The catalogue of known holders: who keeps memory in libraries, how much, and what lets go of it.

Entries are data (`entry.Holder`); a library is never imported to look for it. `docs/holders.md` is made from
them: `python -m memtriage.report.holders > docs/holders.md`.
"""
