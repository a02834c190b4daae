"""From the evidence of a run to what grows; `judgment.py` has the steps in order."""
