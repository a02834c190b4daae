"""`memtriage attach`: what is watched for how long, and what is said where that cannot be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from memtriage.cli.app import main
from memtriage.diagnose.ranks.merge import RunContext
from memtriage.model.report import RankCount, RunReport
from memtriage.outside import elsewhere
from memtriage.outside.memory import OtherBuildError, OutsideError
from memtriage.session import attach as session
from memtriage.session import job_ranks
from support.refusals import Refused

REPORT = RunReport(verdict="clean", steps=7, findings=[], marks=[], ledger={}, ranks=RankCount(seen=1, of=1))


class Watching:
    """A watch from outside that only notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], float]] = []
        self.error: Exception | None = None

    def __call__(self, pids: list[int], seconds: float, say: Callable[[str], None]) -> Any:
        self.asked.append((pids, seconds))
        if self.error is not None:
            raise self.error
        say("it may take a while")
        return REPORT, RunContext(argv=["train.py"])


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Watching:
    made = Watching()
    monkeypatch.setattr(session, "attach", made)
    return made


@pytest.mark.parametrize(("given", "seconds"), [([], 60.0), (["--for", "2m"], 120.0)])
def test_a_process_is_watched_for_a_time(
    watching: Watching, given: list[str], seconds: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attach", "4711", *given]) == 0
    assert watching.asked == [([4711], seconds)]
    shown = capsys.readouterr()
    assert shown.err == "memtriage attach: it may take a while\n"
    assert "CLEAN" in shown.out and "train.py · 7 steps" in shown.out


def test_a_time_that_is_none_is_refused(watching: Watching, refused: Refused) -> None:
    expected = "memtriage attach: invalid --for '5d': use 60s, 5m or 1h"
    assert refused("attach", "4711", "--for=5d") == expected
    assert watching.asked == []


def test_all_ranks_of_its_job_are_watched(watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_ranks, "ranks_of", lambda pid: [pid, pid + 1])
    assert main(["attach", "4711", "--all-ranks"]) == 0
    assert watching.asked == [([4711, 4712], 60.0)]


def test_the_report_may_be_json(watching: Watching, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["attach", "4711", "--json"]) == 0
    report = json.loads(capfdbinary.readouterr().out)
    assert (report["verdict"], report["steps"]) == ("clean", 7)


@pytest.mark.parametrize(
    ("pid", "said"),
    [(os.getpid(), "its memory cannot be read"), (2**22 + 1, f"there is no process {2**22 + 1}")],
    ids=["this process", "no process"],
)
def test_a_process_that_cannot_be_watched_is_told(
    watching: Watching, pid: int, said: str, refused: Refused
) -> None:
    watching.error = OutsideError("its memory cannot be read")
    assert refused("attach", str(pid)) == f"memtriage attach: {said}"


@pytest.mark.parametrize("status", [0, 2, None])
def test_the_python_of_the_process_is_asked_where_it_is_another(
    watching: Watching,
    status: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run: list[tuple[str, int, list[str]]] = []

    def there(python: str, pid: int, arguments: list[str]) -> int | None:
        run.append((python, pid, arguments))
        return status

    monkeypatch.setattr(elsewhere, "run_there", there)
    watching.error = OtherBuildError("another build of Python", "/venv/bin/python")
    assert main(["attach", "4711", "--for", "2m", "--json"]) == (2 if status is None else status)
    assert run == [("/venv/bin/python", 4711, ["attach", "4711", "--for", "2m", "--json"])]
    said = "" if status is not None else "memtriage attach: another build of Python\n"
    assert capsys.readouterr().err == said


def test_without_its_python_there_is_nothing_to_ask(
    watching: Watching, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr(elsewhere, "run_there", lambda *given: pytest.fail("nothing to run"))
    watching.error = OtherBuildError("another build of Python", None)
    assert refused("attach", "4711") == "memtriage attach: another build of Python"
