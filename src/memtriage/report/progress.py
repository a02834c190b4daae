"""A line on a terminal that says how far a long piece of work is; nothing where nobody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def progress_line(stream: TextIO) -> Iterator[Callable[[str], None] | None]:
    """Give a function that replaces the line before; None where `stream` is no terminal.

    The line is gone at the end.
    """
    if not stream.isatty():
        yield None
        return
    from rich.console import Console

    with Console(file=stream).status("starting the trace") as status:
        yield lambda text: status.update(text)
