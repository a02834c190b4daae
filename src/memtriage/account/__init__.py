"""Observations joined into accounts that add up: the census of live storages, and the closed ledgers.

What could not be named is a row of its own. Nothing is judged here.
"""
