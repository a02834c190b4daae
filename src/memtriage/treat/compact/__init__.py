"""Compaction: moving the few live storages that strand mostly empty segments. See `docs/compact.md`."""

from memtriage.treat.compact.api import compact
from memtriage.treat.compact.relocate import CompactionError
from memtriage.treat.compact.result import Compaction, DeviceCompaction, Refusal

__all__ = ["Compaction", "CompactionError", "DeviceCompaction", "Refusal", "compact"]
