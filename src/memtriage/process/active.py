"""The session that watches this process, if one does: what `memtriage.mark` and `memtriage.step` speak to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from memtriage.model.asked import Answer
    from memtriage.model.findings import Finding
    from memtriage.model.position import TrainingPosition
    from memtriage.model.run_status import RunStatus


class ActiveWatch(Protocol):
    """What code outside `session/` may ask of the watch that is on."""

    @property
    def running(self) -> bool: ...

    @property
    def position(self) -> TrainingPosition: ...

    def mark(self, name: str) -> None: ...

    def user_step(self) -> None: ...

    def residue(self, findings: Sequence[Finding]) -> None: ...

    def statuses(self) -> list[RunStatus]: ...

    def answer(self, within_s: float) -> Answer: ...


session: ActiveWatch | None = None
loaded_before = frozenset(sys.modules) - {"memtriage"}
"""Modules that were loaded before memtriage was: mostly by the interpreter's own start."""
