"""The error for an optional library that is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(library: str, extra: str, what: str) -> Iterator[None]:
    """Import a library in the block; if it is missing, raise an error that names the extra to install.

    Args:
        library: its name, as it is imported.
        extra: memtriage's extra that brings it.
        what: what needs it, at the beginning of a sentence.

    Raises:
        ModuleNotFoundError: the library is missing. What else goes wrong inside passes as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        text = f"{what} needs {library}, which is not installed: pip install 'memtriage[{extra}]'"
        raise ModuleNotFoundError(text, name=library) from None
