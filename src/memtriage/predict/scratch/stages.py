"""When the buffers of an operator are held."""

from __future__ import annotations

Staged = dict[int, list[int]]
"""Bytes of the buffers that are held at once, by how many of the results were allocated before them.

An operator that computes its results one after the other holds other buffers for each.
"""

AT_THE_END = -1
"""After all results were allocated."""
