"""The version of memtriage, also where it runs from a source tree that has no metadata."""

from __future__ import annotations

__version__ = "0.1.0"
