"""Cells in a shell of IPython."""

from __future__ import annotations

from typing import Any


def run(shell: Any, cell: str) -> Any:
    """Run a cell as a user would."""
    return shell.run_cell(cell, store_history=True)
