"""`memtriage.watch`, `mark` and `step`: what a program calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import memtriage
from memtriage.process import active
from support import censuses


@pytest.fixture(autouse=True)
def no_census(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    censuses.leave_out(monkeypatch)
    yield
    assert active.session is None


def test_without_a_watch_marks_and_steps_do_nothing() -> None:
    memtriage.mark("here")
    memtriage.step()


def test_marks_and_steps_are_those_of_the_watch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with memtriage.watch(str(tmp_path), quiet=True) as watch:
        memtriage.mark("here")
        memtriage.step()
        memtriage.step()
        assert active.listener is None
    assert watch.report is not None
    assert watch.report.steps == 2
    marks = [mark.name for mark in watch.report.marks if mark.device == "cpu"]
    assert marks == ["start", "here", "step", "step", "end"]
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.rglob("*.jsonl"))


def test_a_watch_prints_its_report_and_listens_if_it_is_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMTRIAGE_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with memtriage.watch(listen=True):
        assert active.listener is not None
    assert active.listener is None
    out, err = capfd.readouterr()
    assert out == "" and "listening: " in err and "NOT JUDGED" in err
    assert list((tmp_path / "runs").rglob("*.jsonl"))
