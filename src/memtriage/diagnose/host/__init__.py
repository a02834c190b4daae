"""Findings about host memory that is wasted or runs short although nothing leaks.

`evidence.py` is what a watch collected, `findings.py` what that proves.
"""
