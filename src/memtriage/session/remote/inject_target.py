"""Runs inside a process that is asked from outside: take the census and write the answer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from memtriage.model.asked import Answer
from memtriage.observe.alone import backward_runs
from memtriage.process import active
from memtriage.process.json_text import encode
from memtriage.session.remote.take import take_answer

_NO_WAIT_S: Final = 0.0


def answer_into(path: str, borrowed: str | None) -> None:
    """Write this process's census to a file, completely or not at all. Called in its main thread.

    Args:
        path: of the answer; the requesting process made its directory, which may be gone by now.
        borrowed: where memtriage was imported from, if this process has none of its own.
    """
    answer = _answer()
    if borrowed is not None:
        answer.notes.append(
            f"this process could not import memtriage: it was taken from {borrowed}, and stays imported"
        )
    partial = Path(f"{path}.partial")
    if partial.parent.is_dir():
        partial.write_bytes(encode(answer))
        os.replace(partial, path)


def _answer() -> Answer:
    if backward_runs():
        busy = "it is inside a backward, whose graph must not be read"
        return Answer(pid=os.getpid(), refused=busy, retry=True)
    if active.session is not None and active.session.running:
        return active.session.answer(_NO_WAIT_S)
    return take_answer() or Answer(pid=os.getpid(), refused="a backward has begun", retry=True)
