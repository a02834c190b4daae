"""The cheapest changes with which a training step fits a budget: each candidate is simulated anew."""
