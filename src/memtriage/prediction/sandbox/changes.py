"""What a traced program wrote and deleted, none of which reached the user's files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final

_NAMED: Final = 3
"""How many files the line names: enough to recognize a checkpoint, few enough for one line."""


@dataclass(slots=True)
class Changes:
    """Absolute paths of files.

    Attributes:
        written: made, replaced or appended to.
        deleted: removed or renamed.
    """

    written: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)

    def line(self, directory: str) -> str | None:
        """One line for the user; None where nothing changed.

        Compiled Python files do not count.

        Args:
            directory: the working directory; its files are named first, by their relative path.
        """
        parts = []
        written, deleted = (_named(paths, directory) for paths in (self.written, self.deleted))
        if written:
            were = "was" if len(written) == 1 else "were"
            parts.append(f"{_files(written)} that the script wrote {were} discarded ({_some(written)})")
        if deleted:
            still = "is still there" if len(deleted) == 1 else "are still there"
            parts.append(f"{_files(deleted)} that the script deleted {still} ({_some(deleted)})")
        return "; ".join(parts) or None


def _named(paths: list[str], directory: str) -> list[str]:
    inside = directory.rstrip("/") + "/"
    own = sorted(path[len(inside) :] for path in paths if path.startswith(inside))
    other = sorted(path for path in paths if not path.startswith(inside))
    return [path for path in [*own, *other] if "__pycache__" not in path.split(os.sep)]


def _files(paths: list[str]) -> str:
    return f"{len(paths)} file{'s' if len(paths) != 1 else ''}"


def _some(paths: list[str]) -> str:
    return ", ".join([*paths[:_NAMED], *(["…"] if len(paths) > _NAMED else [])])
