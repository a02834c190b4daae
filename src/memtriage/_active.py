"""The session that watches this process, if one does: what `memtriage.mark` and `memtriage.step` speak to."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memtriage.session.core import Session

session: Session | None = None
loaded_before = frozenset(sys.modules) - {"memtriage"}
"""Modules that were loaded before memtriage was: mostly by the interpreter's own start."""
