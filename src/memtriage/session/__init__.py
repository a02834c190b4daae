"""The watch: runs the script, turns hooks into marks, follows suspicions, hands the record to the report.

The only place where observing, judging and reporting meet while a program runs. Start at `core.py`.
"""
