"""A job of another build is read in its own interpreter, if that has memtriage and belongs to the user."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memtriage.cli.app import main
from memtriage.outside import answer, elsewhere
from memtriage.outside.elsewhere import run_there
from memtriage.outside.memory import OtherBuildError
from memtriage.outside.same_build import interpreter_of
from support.jobs import job_of


@pytest.fixture
def job() -> Iterator[int]:
    with job_of("input()", says="") as process:
        yield process.pid


def test_the_interpreter_is_that_of_the_virtual_environment(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(os.path.realpath(sys.executable))
    for called in (str(python), "bin/python", "python"):  # the last one as a shell finds it
        with subprocess.Popen(
            [called, "-c", "print(1, flush=True); input()"], executable=python, cwd=tmp_path,
            env={"VIRTUAL_ENV": str(tmp_path)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stdout is not None and process.stdout.readline()
            assert interpreter_of(process.pid) == str(python)
            process.kill()


def test_a_command_runs_in_the_interpreter_of_the_job(job: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_there(sys.executable, job, ["--version"]) == 0
    assert capfd.readouterr().out.startswith("memtriage ")
    assert run_there(sys.executable, job, ["no-such-command"]) == 2


def test_what_is_not_run(job: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_there("/bin/sh", job, []) is None  # not the program of the job
    assert run_there("/no/such/python", job, []) is None
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert run_there(sys.executable, job, []) is None
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("MEMTRIAGE_HANDED_OVER", "1")
    assert run_there(sys.executable, job, []) is None


def test_an_interpreter_without_memtriage(job: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "_NEEDED", "no_such_module")
    assert run_there(sys.executable, job, ["--version"]) is None


@pytest.mark.parametrize(
    ("given", "again"),
    [
        (["census", "--pid", "4711", "--json"],
         ["census", "--pid", "4711", "--timeout", "60.0", "--rows", "20", "--json"]),
        (["attach", "4711", "--for", "5s", "--json"], ["attach", "4711", "--for", "5s", "--json"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("status", [0, None])
def test_the_same_command_is_run_there(
    given: list[str], again: list[str], status: int | None,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked = []

    def there(python: str, pid: int, arguments: list[str]) -> int | None:
        asked.append((python, pid, arguments))
        return status

    def other_build(pid: int, **_: object) -> None:
        raise OtherBuildError("another build", "/a/python")

    monkeypatch.setattr(elsewhere, "run_there", there)
    monkeypatch.setattr(answer, "take_census", other_build)
    monkeypatch.setattr("memtriage.session.attach.JobReader", other_build)
    monkeypatch.setattr("memtriage.session.remote.ask.listening", lambda pid: [])
    assert main(given) == (2 if status is None else status)
    assert asked == [("/a/python", 4711, again)]
    assert ("another build" in capfd.readouterr().err) == (status is None)
