"""The result of a watched run, as `memtriage run --json` writes it (schema 1)."""

from __future__ import annotations

import msgspec

from memtriage.model.findings import Finding, Verdict
from memtriage.model.judged import Judged
from memtriage.model.ledger import LedgerRow
from memtriage.model.marks import Mark
from memtriage.model.rank_groups import RankGroups


class RankCount(msgspec.Struct, kw_only=True):
    """How many ranks the report has, and how many the job has."""

    seen: int
    of: int


class RunReport(msgspec.Struct, kw_only=True):
    """Verdict, findings, marks and ledgers of a run. `ledger` maps `cuda:N` and `host` to their rows,
    `ledger_steps` to the step at which each was taken.

    `judged` says for each device how small a leak would have been detected, or why growth could not be
    judged. `rank_groups` exists only for runs of several ranks; in JSON its key is missing otherwise.
    """

    schema: int = 1
    verdict: Verdict
    steps: int
    findings: list[Finding]
    marks: list[Mark]
    ledger: dict[str, list[LedgerRow]]
    ledger_steps: dict[str, int] = msgspec.field(default_factory=dict)
    exception: str | None = None
    judged: dict[str, Judged] = msgspec.field(default_factory=dict)
    ranks: RankCount
    rank_groups: RankGroups | msgspec.UnsetType = msgspec.UNSET
