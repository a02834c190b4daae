"""The callbacks in the real frameworks: a leak is found, marks are made, an error ends the watch."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
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

STEPS = 24
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


def train_with_trainer(folder: Path, callback: TrainerCallback, keep: bool) -> None:
    data = [{"x": torch.randn(64), "labels": torch.zeros(1)} for _ in range(STEPS)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=1, report_to=[], use_cpu=True,
        disable_tqdm=True, eval_strategy="steps", eval_steps=12, save_steps=12, logging_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(
        Model(keep), arguments, train_dataset=data, eval_dataset=data[:2], callbacks=[callback]
    )
    trainer.train()


class Module(lightning.pytorch.LightningModule):
    def __init__(self, keep: bool, fails: bool = False) -> None:
        super().__init__()
        self.model = Model(keep)
        self.fails = fails

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if self.fails and index == 2:
            raise RuntimeError("the program's own error")
        return self.model(batch[0])["loss"]

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.model(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_with_lightning(folder: Path, callback: Any, keep: bool, fails: bool = False) -> None:
    loader = DataLoader(TensorDataset(torch.randn(STEPS, 64)))
    trainer = lightning.pytorch.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback], num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Module(keep, fails), loader, DataLoader(TensorDataset(torch.randn(2, 64))))


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
    done = subprocess.run([sys.executable, __file__, tmp_path], capture_output=True, text=True, check=True)
    assert re.findall(r"^log: (.*)$", done.stdout, re.MULTILINE) == ["INFO"], done.stdout
    assert "memtriage: clean: " in done.stdout
    marks = re.findall(r"^mark: (.*)$", done.stdout, re.MULTILINE)
    assert {"save", "evaluation"} <= set(marks)


def test_an_error_ends_the_watch_and_passes_on(tmp_path: Path) -> None:
    callback = LightningCallback()
    with pytest.raises(RuntimeError, match="own error"):
        train_with_lightning(tmp_path, callback, keep=False, fails=True)
    assert "program's own error" in callback.report.exception
    assert active.session is None


def test_either_name_of_lightning_has_its_own_base() -> None:
    import pytorch_lightning

    assert issubclass(OlderCallback, pytorch_lightning.Callback)
    assert issubclass(LightningCallback, lightning.pytorch.Callback)


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
