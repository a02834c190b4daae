"""A remedy for those who keep DeepSpeed's optimizer offload: fewer bytes on the host, the same bits.

`internals.py` knows DeepSpeed's parts, `remedy.py` puts the patches on and off. See `docs/deepspeed.md`.
"""
