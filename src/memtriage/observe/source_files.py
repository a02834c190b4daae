"""Source files of the program, parsed."""

from __future__ import annotations

import ast
import sys
import warnings
from pathlib import Path
from typing import Final

_WARNS: Final = SyntaxWarning if sys.version_info >= (3, 12) else DeprecationWarning
"""What the parser warns with, such as of an escape sequence that is none."""
_SILENT: Final = ("ignore", None, _WARNS, None, 0)
"""A filter of `warnings`: what Python has to say of a file, it said when the program imported it."""
_LARGEST: Final = 2_000_000
"""Bytes of source that are parsed."""


def parse_file(filename: str) -> ast.Module | None:
    """Return what a file says; None where it cannot be read or is too large.

    `warnings.catch_warnings` would make the program's own warnings appear a second time.
    """
    warnings.filters.insert(0, _SILENT)  # type: ignore[attr-defined]
    try:
        source = Path(filename).read_bytes()
        return ast.parse(source, filename) if len(source) <= _LARGEST else None
    except (OSError, SyntaxError, ValueError):
        return None
    finally:
        warnings.filters.remove(_SILENT)  # type: ignore[attr-defined]
