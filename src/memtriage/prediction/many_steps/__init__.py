"""A run of many steps whose batches differ: each shape is traced once, the allocator sees all steps.

`api.py` has the steps in order.
"""
