"""Living inside somebody else's process: threads, descriptors and messages that it does not notice.

Everything that is needed to leave the watched program as it is, and nothing about memory.
"""
