"""The command line, one file a sub-command: parse, call, print."""
