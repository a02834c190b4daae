"""Estimate growth of counters (`trend.py`) and of holders (`history.py`, `proof.py`, `holders.py`).

Statistics over marks and censuses. `diagnose/judge.py` makes findings of them.
"""
