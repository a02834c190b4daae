"""Which commands work on which operating system, and what the others say there."""

from __future__ import annotations

from typing import Final

_NAMES: Final = {"darwin": "macOS", "win32": "Windows"}
_LINUX: Final = frozenset({"run", "census", "compare"})
"""They read Linux's counters of processes and glibc's of malloc."""
_POSIX: Final = frozenset({"predict", "plan"})
"""They trace a program in a child process that POSIX calls keep away from your files."""


def refusal(command: str, platform: str) -> str | None:
    """Return why a command cannot work on a system, in one line; None where it can.

    Args:
        command: its name, e.g. `run`.
        platform: as `sys.platform`.
    """
    if platform == "linux" or command not in _LINUX | (_POSIX if platform == "win32" else frozenset()):
        return None
    elsewhere = "explain, snapshot, report, top, holders, metrics and doctor work here"
    return f"needs Linux, and this is {_NAMES.get(platform, platform)}; {elsewhere}"
