"""`memtriage.MetricWriter` into the real TensorBoard, Weights & Biases (offline) and MLflow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memtriage
from support import censuses

RSS = "memtriage/host/rss_bytes"


def train(writer: memtriage.MetricWriter, steps: int = 3) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        writer.write()


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    censuses.leave_out(monkeypatch)
    with memtriage.watch(tmp_path / "record", quiet=True):
        yield


def test_tensorboard_has_a_curve_of_each(tmp_path: Path, watched: None) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "board")) as board:
        train(memtriage.MetricWriter(board))
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert {RSS, "memtriage/cpu/allocated_bytes"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars(RSS)] == [1, 2, 3]
    assert all(event.value > 1e6 for event in events.Scalars(RSS))


def test_wandb_has_them_over_a_step_of_their_own(
    tmp_path: Path, watched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")

    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="memtriage") as run:
        run.log({"loss": 1.0})  # the program's own rows count W&B's steps
        train(memtriage.MetricWriter(run))
        run.log({"loss": 0.5})
        rows, summary = run.step, dict(run.summary)
    assert rows == 5
    assert (summary["loss"], summary["memtriage/step"]) == (0.5, 3)
    assert summary[RSS] > 1e6
    wandb.teardown()  # waits for the end of W&B's own process, which writes the file
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"memtriage/*" in file.read_bytes()  # the curves are drawn over it


def test_mlflow_has_them_in_its_active_run(
    tmp_path: Path, watched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the server-less store of mlflow-skinny
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    try:
        with mlflow.start_run() as run:
            train(memtriage.MetricWriter(mlflow))
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, RSS)
    finally:
        mlflow.set_tracking_uri(before)
    assert [metric.step for metric in history] == [1, 2, 3]
    assert all(metric.value > 1e6 for metric in history)


def test_a_function_takes_values_and_step(watched: None) -> None:
    taken: list[tuple[dict[str, float], int]] = []
    other: list[int] = []
    writer = memtriage.MetricWriter(
        lambda values, step: taken.append((values, step)), lambda values, step: other.append(step), every=2
    )
    train(writer, steps=5)
    assert [step for _, step in taken] == other == [1, 3, 5]
    assert all(RSS in values for values, _ in taken)
    writer.write(70)
    writer.write(80)
    assert other[-1] == 80


def test_without_a_watch_nothing_is_written() -> None:
    taken: list[Any] = []
    train(memtriage.MetricWriter(lambda values, step: taken.append(step)))
    assert taken == []


def test_what_cannot_be_written_to_is_refused() -> None:
    with pytest.raises(TypeError, match="int"):
        memtriage.MetricWriter(3)
    with pytest.raises(TypeError, match="SummaryWriter"):
        memtriage.MetricWriter()
    with pytest.raises(ValueError, match="every"):
        memtriage.MetricWriter(print, every=0)


@pytest.mark.parametrize("name", ["define_metric", "log"])
def test_a_run_of_wandb_is_known_by_both_of_its_functions(name: str) -> None:
    with pytest.raises(TypeError, match="cannot write metrics to a SimpleNamespace"):
        memtriage.MetricWriter(SimpleNamespace(**{name: print}))
