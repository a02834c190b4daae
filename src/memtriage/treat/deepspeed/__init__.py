"""A remedy for DeepSpeed's optimizer offload: fewer bytes on the host, bit-identical results.

`internals.py` knows DeepSpeed's parts, `remedy.py` applies and removes the patches. See `docs/deepspeed.md`.
"""
