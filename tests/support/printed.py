"""What a report prints on a console."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from rich.console import Console


def printed(
    render: Callable[..., object],
    what: Any,
    *more: Any,
    width: int = 100,
    encoding: str = "utf-8",
    terminal: bool = False,
    colors: bool = False,
    **options: Any,
) -> str:
    """What is printed of something: into a file, or with `terminal` or `colors` on a terminal."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    console = Console(
        file=stream,
        width=width,
        highlight=False,
        markup=False,
        emoji=False,
        force_terminal=terminal or colors,
        color_system="standard" if colors else None,
        _environ={},
    )
    render(what, console, *more, **options)
    stream.seek(0)
    return stream.read()
