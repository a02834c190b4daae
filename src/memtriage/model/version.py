"""The version of memtriage, also when it runs from a source tree without metadata."""

from __future__ import annotations

__version__ = "0.1.0"
