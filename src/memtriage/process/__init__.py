"""Running inside the program's process unnoticed: threads, descriptors, messages, the collector.

Everything that is needed to leave the watched program as it is, and nothing about memory.
"""
