"""From accounts to findings: growth, leaks, mechanisms, residue, out of memory, the verdict.

Pure functions of numbers and records. Thresholds are in named, frozen policies, with their reasons.
"""
