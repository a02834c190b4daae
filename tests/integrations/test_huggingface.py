"""What the Trainer's callback does at each call: the watch of a training, marks, metrics for reporters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import TrainerControl, TrainerState
from transformers.integrations.integration_utils import DVCLiveCallback, MLflowCallback, TensorBoardCallback
from transformers.trainer_callback import CallbackHandler, PrinterCallback

from memtriage.integrations import huggingface
from memtriage.integrations.huggingface import MemtriageCallback

pytestmark = pytest.mark.usefixtures("no_census")
VALUES = {"memtriage/host/rss_bytes": 1.0}


class Noting:
    """Notes the logs that it is given instead of sending them."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append(logs)
        if logs is not None:
            logs["its own"] = 0.0  # as some of them add to what they get

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None: ...

    def on_train_end(self, *args: Any, **kwargs: Any) -> None: ...


class Board(Noting, TensorBoardCallback): ...


class Flow(Noting, MLflowCallback):
    def __del__(self) -> None: ...


class Live(Noting, DVCLiveCallback): ...


class Printer(Noting, PrinterCallback): ...


class Calls:
    """Calls back as Trainer does."""

    def __init__(self, folder: Path, *callbacks: Any, first: bool = True) -> None:
        self.args: Any = SimpleNamespace(output_dir=str(folder))
        self.state = TrainerState(is_world_process_zero=first)
        self.handler = CallbackHandler(list(callbacks), None, None, None, None)

    def __call__(self, event: str, **given: Any) -> None:
        self.handler.call_event(event, self.args, self.state, TrainerControl(), **given)


def test_a_training_is_watched_with_a_mark_at_each_end(tmp_path: Path) -> None:
    callback = MemtriageCallback()
    call = Calls(tmp_path, callback)
    for event in ("on_train_begin", "on_evaluate", "on_save"):
        call(event)
    call("on_predict", metrics={})
    assert callback.report is None
    call("on_train_end")
    report = callback.report
    names = list(dict.fromkeys(mark.name for mark in report.marks))
    assert names == ["start", "train begin", "evaluation", "save", "prediction", "train end", "end"]
    assert list((tmp_path / "memtriage").rglob("*.jsonl"))
    call("on_train_end")
    assert callback.report is report


def test_the_record_goes_where_it_is_asked_for(tmp_path: Path) -> None:
    callback = MemtriageCallback(str(tmp_path / "own"))
    call = Calls(tmp_path / "out", callback)
    call("on_train_begin")
    call("on_train_end")
    assert list((tmp_path / "own").rglob("*.jsonl")) and not (tmp_path / "out").exists()


def test_reporters_get_the_metrics_when_trainer_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that `report_to` stands for but those that count a log as a step; each gets a dict of its own."""
    monkeypatch.setattr(huggingface, "metrics", lambda: VALUES)
    board, flow, live, printer = Board(), Flow(), Live(), Printer()
    callback = MemtriageCallback(tmp_path)
    call = Calls(tmp_path, board, flow, live, printer, callback)
    call("on_train_begin")
    call("on_log", logs={"loss": 1.0})
    theirs = {"loss": 1.0, "its own": 0.0}
    for reporter in (board, flow):
        assert reporter.logged == [theirs, {**VALUES, "its own": 0.0}]
    assert live.logged == printer.logged == [theirs]
    assert VALUES == {"memtriage/host/rss_bytes": 1.0}
    call("on_train_end")
    call("on_log", logs={"loss": 1.0})
    assert len(board.logged) == 3  # after the end only Trainer's own


def test_no_metrics_are_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "metrics", dict)
    board = Board()
    call = Calls(tmp_path, board, MemtriageCallback(tmp_path))
    for event in ("on_train_begin", "on_log", "on_train_end"):
        call(event)
    assert board.logged == [None]


@pytest.mark.parametrize(
    ("asked", "first", "reporters"), [(False, True, [Board]), (True, False, [Board]), (True, True, [Printer])]
)
def test_without_a_reporter_nothing_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool, first: bool, reporters: list[type[Noting]]
) -> None:
    def forbidden() -> dict[str, float]:
        raise AssertionError("metrics were computed for nobody")

    monkeypatch.setattr(huggingface, "metrics", forbidden)
    callback = MemtriageCallback(tmp_path, metrics=asked)
    call = Calls(tmp_path, callback, *(reporter() for reporter in reporters), first=first)
    for event in ("on_train_begin", "on_log", "on_train_end"):
        call(event)


def test_called_by_something_else_it_has_no_reporters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "metrics", lambda: VALUES)
    callback, state = MemtriageCallback(tmp_path), TrainerState(is_world_process_zero=True)
    given: tuple[Any, ...] = (SimpleNamespace(output_dir=str(tmp_path)), state, TrainerControl())
    callback.on_train_begin(*given)
    callback.on_log(*given, logs={})
    callback.on_train_end(*given)
    assert callback.report is not None
