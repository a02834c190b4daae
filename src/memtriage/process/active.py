"""The session that watches this process, if there is one: `memtriage.mark` and `memtriage.step` call it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from memtriage.model.findings import Finding
    from memtriage.model.position import TrainingPosition
    from memtriage.model.run_status import RunStatus


class ActiveWatch(Protocol):
    """The part of a session that code outside `session/` uses."""

    @property
    def running(self) -> bool: ...

    @property
    def position(self) -> TrainingPosition: ...

    def mark(self, name: str) -> None: ...

    def user_step(self) -> None: ...

    def residue(self, findings: Sequence[Finding]) -> None: ...

    def statuses(self) -> list[RunStatus]: ...


class ActiveListener(Protocol):
    """What answers for this process."""

    def stop(self) -> None: ...


session: ActiveWatch | None = None
listener: ActiveListener | None = None
"""There is one socket per process: whoever listens next stops it."""
loaded_before = frozenset(sys.modules) - {"memtriage"}
"""Modules that were loaded before memtriage was: mostly by the interpreter's own start."""
