"""From accounts to findings: growth, leaks, mechanisms, residue, out of memory, the verdict.

Pure functions over numbers and records. Thresholds live in named, frozen policies with their reason.
"""
