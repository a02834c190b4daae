"""How commands answer: with a result, on the terminal or as JSON, or with one line that says why not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


class Refusal(Exception):
    """A command cannot do its work. `memtriage.cli.app` prints the text, which is one line for the user."""


def answer(result: object, as_json: bool, render: Callable[[Console], None]) -> int:
    """Print a result and return the exit status 0.

    Args:
        result: as JSON has it, which is one line.
        as_json: print that line.
        render: prints it on a console otherwise.
    """
    if as_json:
        import msgspec

        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    else:
        from memtriage.report.console import console_for

        render(console_for(sys.stdout))
    return 0
