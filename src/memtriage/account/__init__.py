"""Join observations into accounts that add up: the census of live storages, and the closed ledgers.

What cannot be named has a separate row. Nothing is judged here.
"""
