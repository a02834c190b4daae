"""The watch next to the program's signal handlers: the report is written before a signal kills.

`own_work.py` keeps the two apart; `watchdog.py` helps if the process cannot act on a signal.
"""
