"""Plain data types of memtriage: no torch, no input or output, no decisions."""

from memtriage.model.findings import DEVICE_HOST, Finding, FindingKind, Verdict
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.marks import Mark
from memtriage.model.report import RankCount, RunReport

__all__ = [
    "DEVICE_HOST",
    "Finding",
    "FindingKind",
    "Ledger",
    "LedgerRow",
    "Mark",
    "RankCount",
    "RunReport",
    "Verdict",
]
