"""Source files of the program, parsed."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from pathlib import Path
from typing import Final

_WARNS: Final = SyntaxWarning if sys.version_info >= (3, 12) else DeprecationWarning
"""The category of the parser's warnings, such as for an invalid escape sequence."""
_SILENT: Final = ("ignore", None, _WARNS, None, 0)
"""A filter of `warnings`: Python already warned about a file when the program imported it."""
_LARGEST: Final = 2_000_000
"""Most bytes of a source file that is parsed."""


def parse_file(filename: str) -> ast.Module | None:
    """Return a parsed file; None if it cannot be read or is too large.

    `warnings.catch_warnings` is not used: it would make the program's own warnings appear again.
    """
    warnings.filters.insert(0, _SILENT)  # type: ignore[attr-defined]
    try:
        source = Path(filename).read_bytes()
        return ast.parse(source, filename) if len(source) <= _LARGEST else None
    except (OSError, SyntaxError, ValueError):
        return None
    finally:
        warnings.filters.remove(_SILENT)  # type: ignore[attr-defined]


def words_of(filename: str) -> frozenset[str]:
    """Return the words of a file, without its structure; none if it cannot be read or is too large."""
    try:
        source = Path(filename).read_bytes()
    except (OSError, ValueError):
        return frozenset()
    text = source.decode(errors="replace") if len(source) <= _LARGEST else ""
    return frozenset(re.findall(r"\w+", text))
