"""The cheapest changes with which a training step fits a budget: each candidate is predicted again.

`ladder.py` lists the changes in order of cost, `search.py` looks for the cheapest set.
"""
