"""The session that watches this process, if one does: what `memtriage.mark` and `memtriage.step` speak to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memtriage.session.core import Session

session: Session | None = None
