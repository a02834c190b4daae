"""Find the cheapest changes with which a training step fits a budget; each candidate is predicted.

`ladder.py` lists the changes in order of cost, `search.py` finds the cheapest set.
"""
