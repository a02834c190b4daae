"""When a census is taken and what comes of it: one scheduler per scale that growth is counted in.

`scheduler.py` hands marks out, `investigation.py` takes the censuses, `judgment.py` makes findings.
"""
