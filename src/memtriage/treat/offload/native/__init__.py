"""The compiled kernel of `OffloadedAdamW`: built on the user's machine and compared with torch bit for bit.

If any of that fails, torch's own kernels do the work.
"""
