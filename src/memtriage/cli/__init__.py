"""The command line, one file per sub-command: parse, call, print.

`app.py` chooses the command, `trace_options.py` is what `predict` and `plan` share.
"""
