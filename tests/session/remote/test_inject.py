"""Asking processes that do not listen. `sys.remote_exec` needs Python 3.14; elsewhere a signal is used."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memtriage.model.asked import Answer
from memtriage.session.remote import inject
from memtriage.session.remote.ask import AskError
from memtriage.session.remote.inject import python_of, unable

_JOB = """
import os, signal, sys

where, kind = sys.argv[1:]

def run(signum, frame):
    # what the interpreter does for sys.remote_exec: a script, in a namespace of its own, in the main thread
    path = open(where).read()
    exec(open(path).read(), {"__builtins__": __builtins__})

signal.signal(signal.SIGUSR1, run)
if kind != "idle":
    import torch

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "memtriage" and not any("borrowed" in p for p in sys.path):
            raise ImportError(f"no {name} here")

def train():
    kept = [torch.zeros(50_021) for _ in range(4)]
    if kind == "without":
        sys.meta_path.insert(0, Hidden())
    if kind == "backward":
        parameter = torch.ones(1, requires_grad=True)
        parameter.register_hook(lambda gradient: wait(".go"))
        (parameter * 2).sum().backward()
    wait()

def wait(ending=".stop"):
    print("ready", flush=True)
    while not os.path.exists(where + ending):
        sum(range(1000))

wait() if kind == "idle" else train()
"""

Ask = Callable[..., Any]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], Ask]]]:
    """Starts a training process, and gives a function that asks it."""
    started: list[subprocess.Popen[str]] = []

    def start(kind: str) -> tuple[subprocess.Popen[str], Ask]:
        where = tmp_path / "script"
        process = subprocess.Popen(
            [sys.executable, "-c", _JOB, str(where), kind],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"

        def by_signal(pid: int, script: str) -> None:
            where.write_text(script)
            os.kill(pid, signal.SIGUSR1)

        real = getattr(sys, "remote_exec", None)

        def ask(timeout_s: float = 60.0, by: Any = None, seen: Any = lambda answer: answer) -> Any:
            request = inject._Request.answer
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(inject._Request, "answer", lambda self, until: seen(request(self, until)))
                return inject.inject(process.pid, timeout_s, by or real or by_signal)

        return process, ask

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where requests lie."""
    found = tmp_path / "requests"
    found.mkdir()
    monkeypatch.setattr(inject.tempfile, "tempdir", str(found))
    return found


def test_a_process_that_was_not_started_with_memtriage(job: Any, folders: Path) -> None:
    process, ask = job("with")
    answer = ask()
    assert answer.pid == process.pid and answer.step is None
    row = next(holder for holder in answer.holders if holder.bytes == 4 * 4 * 50_021)
    assert row.holder == "frame train(): kept[*]"
    assert answer.notes == []
    assert process.poll() is None
    assert list(folders.iterdir()) == []
    assert ask().holders == answer.holders  # nothing was kept, nothing was changed


def test_a_process_that_cannot_import_memtriage_borrows_it(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrowed = tmp_path / "borrowed"
    borrowed.symlink_to(Path(inject.__file__).parents[2])
    theirs = SimpleNamespace(origin=str(borrowed / "memtriage/__init__.py"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: theirs if name == "memtriage" else find_spec(name)
    )
    _, ask = job("without")
    answer = ask()
    assert answer.holders != []
    assert answer.notes == [
        f"this process could not import memtriage: it was taken from {borrowed}, and stays imported"
    ]


def test_inside_a_backward_it_is_asked_again(job: Any, tmp_path: Path) -> None:
    _, ask = job("backward")
    refused: list[str] = []

    def note(answer: Answer) -> Answer:
        if answer.refused is not None:
            refused.append(answer.refused)
            (tmp_path / "script.go").touch()
        return answer

    answer = ask(seen=note)
    assert refused[0] == "it is inside a backward, whose graph must not be read"
    assert answer.refused is None and answer.holders != []


def test_a_process_that_does_not_come_to_it(job: Any, folders: Path) -> None:
    process, ask = job("idle")
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(AskError, match="came to no safe point"):
        ask(timeout_s=0.05)
    # When it goes on, it finds a script, but an empty one.
    (folder,) = folders.iterdir()
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("census.py", "")]


def test_a_process_that_ends_meanwhile(job: Any, folders: Path) -> None:
    process, ask = job("idle")

    def kill(pid: int, script: str) -> None:
        process.kill()
        process.wait()

    with pytest.raises(AskError, match=f"process {process.pid} ended before it answered"):
        ask(by=kill)
    assert list(folders.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(1, "Operation not permitted"), "may not be asked .*ptrace_scope"),
        (
            RuntimeError("Remote debugging is not enabled in the remote process"),
            "PYTHON_DISABLE_REMOTE_DEBUG",
        ),
        (RuntimeError("no PyRuntime"), r"cannot be asked \(no PyRuntime\)"),
    ],
)
def test_what_the_interpreter_refuses(error: Exception, said: str, folders: Path) -> None:
    def refuse(pid: int, script: str) -> None:
        raise error

    with pytest.raises(AskError, match=said):
        inject.inject(os.getpid(), 5.0, refuse)
    assert list(folders.iterdir()) == []


def test_the_version_of_a_process_is_read_from_what_it_has_mapped() -> None:
    python = python_of(os.getpid())
    assert python in (None, tuple(sys.version_info[:2]))  # None: an interpreter under another name
    assert python_of(2**22 + 1) is None


@pytest.mark.parametrize(
    ("theirs", "own", "said"),
    [
        (None, (3, 14), "no Python was found in it"),
        ((3, 11), (3, 14), "its Python 3.11 cannot be asked from outside, which needs Python 3.14"),
        ((3, 14), (3, 11), "run `python3.14 -m memtriage census --pid 7`"),
        ((3, 15), (3, 14), "run `python3.15 -m memtriage census --pid 7`"),
        ((3, 14), (3, 14), None),
    ],
)
def test_why_a_process_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, theirs: Any, own: tuple[int, int], said: str | None
) -> None:
    monkeypatch.setattr(inject, "python_of", lambda pid: theirs)
    monkeypatch.setattr(inject.sys, "version_info", (*own, 0))
    monkeypatch.setattr(inject.sys, "remote_exec", lambda pid, script: None, raising=False)
    why = unable(7)
    assert why is said if said is None else said in str(why)
