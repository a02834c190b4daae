"""Which right is missing, and the command that grants it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from memtriage.outside import answer
from memtriage.outside.memory import ForbiddenError, GoneError

_OWNER = 1000


@pytest.mark.parametrize(
    ("user", "scope", "expected"),
    [
        (_OWNER, "1", "ptrace_scope is 1; run memtriage with sudo, or .*echo 0 . sudo tee"),
        (_OWNER, "2", "ptrace_scope is 2; run memtriage with sudo"),
        (_OWNER, "3", "only a reboot changes; let later jobs listen: `memtriage install-listener`"),
        (_OWNER, "0", "--cap-add=SYS_PTRACE"),
        (_OWNER, None, "--cap-add=SYS_PTRACE"),
        (0, "1", "--cap-add=SYS_PTRACE"),
        (0, "3", "only a reboot changes"),
        (4711, "0", "it belongs to user 1000; run `sudo -u '#1000' memtriage attach [0-9]+`"),
    ],
)
def test_the_missing_right(
    user: int, scope: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, stat = f"/proc/{os.getpid()}", os.stat

    def owned(path: Any, **how: Any) -> os.stat_result:
        found = stat(path, **how)
        if path != folder:
            return found
        return os.stat_result([*found[:4], _OWNER, *found[5:10]])

    file = tmp_path / "ptrace_scope"
    if scope is not None:
        file.write_text(f"{scope}\n")
    monkeypatch.setattr(os, "stat", owned)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(answer, "_SCOPE", file)
    text = answer.why_refused(ForbiddenError("process may not be read"), os.getpid(), "attach")
    assert "\n" not in text
    assert re.search(expected, text)


def test_other_errors_stay_as_they_are() -> None:
    assert answer.why_refused(GoneError("process 1 ended"), 1) == "process 1 ended"
