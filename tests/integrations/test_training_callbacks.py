"""The callbacks in the real frameworks: leaks, marks, errors, and metrics where the frameworks log."""

import csv
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, TensorDataset

from memtriage.integrations.huggingface import MemtriageCallback as TrainerCallback
from memtriage.integrations.lightning import MemtriageCallback as LightningCallback
from memtriage.integrations.pytorch_lightning import MemtriageCallback as OlderCallback
from memtriage.process import active
from support import censuses

STEPS = 24
RSS = "memtriage/host/rss_bytes"
KEPT: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def nothing_kept() -> Any:
    yield
    KEPT.clear()


class Model(torch.nn.Module):
    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.keep = keep

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        if self.keep and self.training:
            KEPT.append(torch.zeros(64 << 10))
        return {"loss": out.square().mean(), "logits": out}


def train_with_trainer(folder: Path, callback: TrainerCallback, keep: bool = False, **given: Any) -> None:
    usual = {
        "max_steps": STEPS, "report_to": [], "eval_strategy": "steps", "eval_steps": 12, "save_steps": 12,
        "logging_strategy": "no",
    }  # fmt: skip
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=1, use_cpu=True, disable_tqdm=True, **{**usual, **given}
    )
    data = [{"x": torch.randn(64), "labels": torch.zeros(1)} for _ in range(arguments.max_steps)]
    transformers.Trainer(
        Model(keep), arguments, train_dataset=data, eval_dataset=data[:2], callbacks=[callback]
    ).train()


class Module(lightning.pytorch.LightningModule):
    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.model = Model(keep)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.model(batch[0])["loss"]

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.model(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_with_lightning(
    folder: Path, callback: Any, keep: bool = False, batches: int = STEPS, **given: Any
) -> None:
    loader = DataLoader(TensorDataset(torch.randn(batches, 64)))
    trainer = lightning.pytorch.Trainer(
        max_epochs=1, accelerator="cpu", enable_checkpointing=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback], num_sanity_val_steps=0,
        **{"logger": False, **given},
    )  # fmt: skip
    trainer.fit(Module(keep), loader, DataLoader(TensorDataset(torch.randn(2, 64))))


@pytest.mark.parametrize(
    "train", [train_with_trainer, pytest.param(train_with_lightning, marks=pytest.mark.long)]
)
def test_a_leak_is_in_the_log_with_its_holder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, train: Any
) -> None:
    callback = TrainerCallback() if train is train_with_trainer else LightningCallback()
    with caplog.at_level(logging.INFO, "memtriage"):
        train(tmp_path, callback, keep=True)
    assert callback.report.verdict == "leak"
    assert callback.report.steps == STEPS
    assert "KEPT[*]" in callback.report.findings[0].holder
    names = [mark.name for mark in callback.report.marks]
    assert "evaluation" in names
    assert {"train begin", "train end"} <= set(names)
    assert "memtriage: leak" in caplog.text
    assert "KEPT[*]" in caplog.text
    folder = caplog.text.partition("memtriage report ")[2].splitlines()[0]
    assert list(Path(folder).glob("rank-*.jsonl"))
    assert Path(folder).is_relative_to(tmp_path)
    assert active.session is None


def test_a_healthy_training_is_one_line(tmp_path: Path) -> None:
    # In a process of its own: what malloc keeps of the memory of other tests would be a finding.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, __file__, tmp_path], env=environment, capture_output=True, text=True, check=True
    )
    assert re.findall(r"^log: (.*)$", done.stdout, re.MULTILINE) == ["INFO"], done.stdout
    assert "memtriage: clean: " in done.stdout
    marks = re.findall(r"^mark: (.*)$", done.stdout, re.MULTILINE)
    assert {"save", "evaluation"} <= set(marks)


def test_either_name_of_lightning_has_its_own_base() -> None:
    import pytorch_lightning

    assert issubclass(OlderCallback, pytorch_lightning.Callback)
    assert issubclass(LightningCallback, lightning.pytorch.Callback)


# --- metrics ------------------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TensorBoard and MLflow write below this folder."""
    mlflow = pytest.importorskip("mlflow")
    censuses.leave_out(monkeypatch)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    yield tmp_path
    mlflow.set_tracking_uri(before)


@pytest.fixture
def wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A run that the frameworks find and use; `WANDB_MODE` would count only before W&B's first use."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="memtriage") as run:
        yield run


def curves(folder: Path) -> dict[str, list[int]]:
    """Steps of each scalar on the board."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def mlflow_steps() -> list[int]:
    import mlflow

    experiments = [experiment.experiment_id for experiment in mlflow.search_experiments()]
    (run,) = mlflow.search_runs(experiments, output_format="list")
    return [metric.step for metric in mlflow.MlflowClient().get_metric_history(run.info.run_id, RSS)]


def test_lightning_logs_to_all_its_loggers(local: Path, wandb_run: Any) -> None:
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

    board = TensorBoardLogger(local / "lit")
    table = CSVLogger(local / "table")
    loggers = [board, table, WandbLogger(), MLFlowLogger(tracking_uri=(local / "mlruns").as_uri())]
    train_with_lightning(local, LightningCallback(), batches=4, logger=loggers, log_every_n_steps=2)
    assert curves(Path(board.log_dir))[RSS] == [1, 3]
    with Path(table.log_dir, "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file) if row[RSS]] == [1, 3]
    assert mlflow_steps() == [1, 3]
    assert wandb_run.summary[RSS] > 1e6


def train_healthy(folder: Path) -> None:
    """Print the level and text of each line of the log, and each mark."""
    log = logging.StreamHandler(sys.stdout)
    log.setFormatter(logging.Formatter("log: %(levelname)s\n%(message)s"))
    logging.getLogger("memtriage").addHandler(log)
    logging.getLogger("memtriage").setLevel(logging.INFO)
    callback = TrainerCallback(folder / "record")
    train_with_trainer(folder, callback, keep=False)
    for mark in callback.report.marks:
        print("mark:", mark.name)


if __name__ == "__main__":
    train_healthy(Path(sys.argv[1]))
