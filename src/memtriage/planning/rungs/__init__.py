"""The rungs of the ladder: one file per kind of change.

A rung says when it applies, what it changes in the program, and what it costs.
"""
