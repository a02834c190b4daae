"""What Lightning's callback does at each hook: the watch from fit to its end, marks, metrics for loggers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import memtriage
from memtriage.integrations import lightning_hooks
from memtriage.integrations.lightning_hooks import LightningHooks

pytestmark = pytest.mark.usefixtures("no_census")


class Logger:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))


def trainer(folder: Path, **given: Any) -> Any:
    fields = {
        "global_step": 0, "log_dir": None, "default_root_dir": str(folder), "log_every_n_steps": 2,
        "loggers": [Logger()], "is_global_zero": True,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **given})


def steps_logged(hooks: LightningHooks, at: Any, *steps: int) -> list[int]:
    """The steps that a logger has got after batches that ended at these."""
    for step in steps:
        at.global_step = step
        hooks.on_train_batch_end(at, None, None, None, 0)
    return [step for step, _ in at.loggers[0].logged] if at.loggers else []


@pytest.mark.parametrize(
    ("directory", "log_dir", "record"),
    [(None, None, "root/memtriage"), (None, "logs", "logs/memtriage"), ("own", "logs", "own")],
)
def test_the_record_goes_below_the_trainer_s_folder(
    tmp_path: Path, directory: str | None, log_dir: str | None, record: str
) -> None:
    hooks = LightningHooks(None if directory is None else tmp_path / directory)
    at = trainer(tmp_path / "root", log_dir=None if log_dir is None else str(tmp_path / log_dir))
    hooks.on_fit_start(at, None)
    assert hooks.report is None
    hooks.on_fit_end(at, None)
    assert hooks.report.exception is None
    assert [
        path.relative_to(tmp_path).parts[: record.count("/") + 1] for path in tmp_path.rglob("*.jsonl")
    ] == [tuple(record.split("/"))]


def test_each_end_of_a_phase_is_a_mark(tmp_path: Path) -> None:
    hooks, at = LightningHooks(tmp_path), trainer(tmp_path)
    hooks.on_fit_start(at, None)
    hooks.on_validation_end(at, None)
    hooks.on_save_checkpoint(at, None, {})
    hooks.on_fit_end(at, None)
    names = list(dict.fromkeys(mark.name for mark in hooks.report.marks))
    assert names == ["start", "train begin", "evaluation", "save", "train end", "end"]


def test_an_error_ends_the_watch(tmp_path: Path) -> None:
    hooks, at = LightningHooks(tmp_path), trainer(tmp_path)
    hooks.on_fit_start(at, None)
    hooks.on_exception(at, None, ValueError("no data"))
    report = hooks.report
    assert report.exception == "ValueError: no data"
    hooks.on_exception(at, None, ValueError("later"))
    hooks.on_fit_end(at, None)
    assert hooks.report is report


def test_in_a_watched_process_there_is_no_report(tmp_path: Path) -> None:
    hooks, at = LightningHooks(), trainer(tmp_path)
    with memtriage.watch(tmp_path / "outer", quiet=True):
        hooks.on_fit_start(at, None)
        hooks.on_fit_end(at, None)
    assert hooks.report is None
    assert not (tmp_path / "memtriage").exists()


def test_metrics_come_where_lightning_logs_once_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning counts the steps it logs from 0. A step may be of several batches."""
    monkeypatch.setattr(lightning_hooks, "metrics", lambda: {"rss": 1.0})
    at = trainer(tmp_path, loggers=[Logger(), Logger()])
    assert steps_logged(LightningHooks(), at, 0, 0, 1, 2, 2, 3, 4, 5, 6) == [1, 3, 5]
    assert at.loggers[1].logged == at.loggers[0].logged == [(step, {"rss": 1.0}) for step in (1, 3, 5)]


def test_the_step_of_a_checkpoint_was_logged_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_hooks, "metrics", lambda: {"rss": 1.0})
    hooks, at = LightningHooks(tmp_path), trainer(tmp_path, global_step=4)
    hooks.on_fit_start(at, None)
    assert steps_logged(hooks, at, 4, 5, 6) == [5]
    hooks.on_fit_end(at, None)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (False, {}),
        (True, {"loggers": []}),
        (True, {"is_global_zero": False}),
        (True, {"log_every_n_steps": 0}),
    ],
)
def test_without_a_reader_nothing_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool, given: dict[str, Any]
) -> None:
    def forbidden() -> dict[str, float]:
        raise AssertionError("metrics were computed for nobody")

    monkeypatch.setattr(lightning_hooks, "metrics", forbidden)
    assert steps_logged(LightningHooks(metrics=asked), trainer(tmp_path, **given), 1, 2, 3, 4) == []


def test_no_metrics_are_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_hooks, "metrics", dict)
    assert steps_logged(LightningHooks(), trainer(tmp_path), 1, 2, 3, 4) == []
