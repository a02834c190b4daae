"""The compiled kernel of `OffloadedAdamW`: built on the user's machine and proven against torch's bits.

Where any of that fails, torch's own kernels do the work.
"""
