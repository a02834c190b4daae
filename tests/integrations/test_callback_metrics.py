"""The callbacks log memory where the frameworks log: the Trainer's reporters, Lightning's loggers."""

from __future__ import annotations

import csv
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
from support import censuses

pytest.importorskip("tensorboard")
mlflow = pytest.importorskip("mlflow")
wandb = pytest.importorskip("wandb")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

RSS = "memtriage/host/rss_bytes"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        return {"loss": out.square().mean(), "logits": out}


class Module(lightning.pytorch.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.model(batch[0])["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TensorBoard and MLflow write below this folder."""
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
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="memtriage") as run:
        yield run


def trainer_run(folder: Path, callback: TrainerCallback, report_to: list[str]) -> None:
    data = [{"x": torch.randn(8), "labels": torch.zeros(1)} for _ in range(4)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"), max_steps=4, per_device_train_batch_size=1, report_to=report_to,
        use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=2,
    )  # fmt: skip
    transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[callback]).train()


def lightning_run(folder: Path, callback: Any, loggers: Any, batches_a_step: int = 1) -> None:
    trainer = lightning.pytorch.Trainer(
        max_epochs=1, accelerator="cpu", logger=loggers, enable_checkpointing=False, log_every_n_steps=2,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
        accumulate_grad_batches=batches_a_step,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(4 * batches_a_step, 8))))


def curves(folder: Path) -> dict[str, list[int]]:
    """Steps of each scalar on the board."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def mlflow_steps() -> list[int]:
    experiments = [experiment.experiment_id for experiment in mlflow.search_experiments()]
    (run,) = mlflow.search_runs(experiments, output_format="list")
    return [metric.step for metric in mlflow.MlflowClient().get_metric_history(run.info.run_id, RSS)]


def test_trainer_logs_to_all_its_reporters(
    local: Path, wandb_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer_run(local, TrainerCallback(), ["tensorboard", "wandb", "mlflow"])
    found = curves(local / "board")
    assert found[f"train/{RSS}"][:2] == [2, 4]
    assert found["train/loss"] == [2, 4]  # its own are where they were
    assert mlflow_steps()[:2] == [2, 4]
    assert wandb_run.summary[f"train/{RSS}"] > 1e6
    assert RSS not in capsys.readouterr().out  # the lines that Trainer prints stay short


def test_a_subclass_of_the_callback_finds_the_reporters_too(local: Path) -> None:
    class Own(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_begin(*args, **kwargs)

    trainer_run(local, Own(), ["tensorboard"])
    assert f"train/{RSS}" in curves(local / "board")


def test_lightning_logs_to_all_its_loggers(local: Path, wandb_run: Any) -> None:
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

    board = TensorBoardLogger(local / "lit")
    table = CSVLogger(local / "table")
    loggers = [board, table, WandbLogger(), MLFlowLogger(tracking_uri=(local / "mlruns").as_uri())]
    lightning_run(local, LightningCallback(), loggers)
    assert curves(Path(board.log_dir))[RSS] == [1, 3]
    with Path(table.log_dir, "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file) if row[RSS]] == [1, 3]
    assert mlflow_steps() == [1, 3]
    assert wandb_run.summary[RSS] > 1e6


def test_lightning_logs_once_a_step_of_several_batches(local: Path) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger

    board = TensorBoardLogger(local / "lit")
    lightning_run(local, LightningCallback(), board, batches_a_step=3)
    assert curves(Path(board.log_dir))[RSS] == [1, 3]
