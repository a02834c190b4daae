"""Training loops on the real Accelerate, in this process and as two processes under its launcher."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import memtriage
from memtriage.integrations.accelerate import watched
from memtriage.process import active

accelerate = pytest.importorskip("accelerate")

KEPT: list[torch.Tensor] = []
STEPS = 20


@pytest.fixture
def accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MEMTRIAGE_DIR"):
        monkeypatch.delenv(name, raising=False)
    state = pytest.importorskip("accelerate.state").AcceleratorState
    state._reset_state(True)
    made = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=str(tmp_path))
    yield made
    state._reset_state(True)
    KEPT.clear()


def train(accelerator: Any, keep: bool, fails_at: int | None = None) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(torch.randn(4 * STEPS, 64), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader):
        if number == fails_at:
            raise RuntimeError("the program's own error")
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if keep:
            KEPT.append(torch.zeros(32 << 10))


def test_a_leak_is_in_the_log_with_its_holder(
    accelerator: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "memtriage"), watched(accelerator) as training:
        train(accelerator, keep=True)
    report = training.report
    assert report is not None
    assert (report.verdict, report.steps) == ("leak", STEPS)
    (finding,) = report.findings
    assert "KEPT[*]" in (finding.holder or "")
    assert 0 <= finding.bytes_per_step - 2 * (128 << 10) <= 2048  # and tensor objects of their own
    assert finding.bytes_per_microbatch == finding.bytes_per_step // 2
    assert "memtriage: leak" in caplog.text
    assert list((tmp_path / "memtriage").glob("*/0/rank-00000.jsonl"))
    assert active.session is None


def test_marks_of_what_the_accelerator_does(accelerator: Any, tmp_path: Path, no_census: None) -> None:
    own = type(accelerator).save_state
    with watched(accelerator, directory=tmp_path / "elsewhere") as training:
        train(accelerator, keep=False)
        saved = accelerator.save_state(str(tmp_path / "state"))
        accelerator.load_state(saved)
        accelerator.free_memory()
    report = training.report
    assert report is not None
    names = list(dict.fromkeys(m.name for m in report.marks if m.name not in ("time", "backward", "step")))
    assert names == ["start", "train begin", "prepare", "save", "load", "free memory", "train end", "end"]
    assert Path(saved) == tmp_path / "state"
    assert list((tmp_path / "elsewhere").glob("*/0/rank-00000.jsonl"))
    assert "save_state" not in vars(accelerator)
    assert accelerator.save_state.__func__ is own


def test_a_method_that_the_program_replaced_stays_as_it_is(accelerator: Any, no_census: None) -> None:

    def own(*args: Any, **kwargs: Any) -> None:
        """Saves in a way of its own."""

    accelerator.save_state = own
    with watched(accelerator):
        assert accelerator.save_state is own
    assert accelerator.save_state is own


def test_an_error_ends_the_watch_and_passes_on(accelerator: Any, no_census: None) -> None:
    training = watched(accelerator)
    with pytest.raises(RuntimeError, match="own error"), training:
        train(accelerator, keep=False, fails_at=3)
    assert training.report is not None
    assert "program's own error" in (training.report.exception or "")
    assert "prepare" not in vars(accelerator)
    assert active.session is None


def test_in_a_watched_process_only_marks_are_made(accelerator: Any, tmp_path: Path, no_census: None) -> None:
    with memtriage.watch(tmp_path / "outer", quiet=True) as outer, watched(accelerator) as training:
        train(accelerator, keep=False)
    assert training.report is None
    assert outer.report is not None
    assert {"train begin", "prepare", "train end"} <= {mark.name for mark in outer.report.marks}
    assert not (tmp_path / "memtriage").exists()


SCRIPT = """
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from memtriage.integrations.accelerate import watched

    KEPT = []

    def main():
        accelerator = Accelerator(cpu=True)
        with watched(accelerator, directory=WHERE):
            model = torch.nn.Linear(64, 64)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(torch.randn(80, 64), batch_size=2)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for batch in loader:
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.process_index == 1:
                    KEPT.append(torch.zeros(64 << 10))
            accelerator.save_state("state")
        accelerator.end_training()

    main()
"""
LAUNCHER = [
    "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
]  # fmt: skip


@pytest.mark.long
def test_two_processes_under_its_launcher_are_one_run(tmp_path: Path) -> None:
    """Gloo is what Accelerate takes on the CPU, whatever its launcher was told."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT).replace("WHERE", "'runs'"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MEMTRIAGE_DIR": ""}
    done = subprocess.run(
        [sys.executable, *LAUNCHER, "train.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    again = subprocess.run(
        [sys.executable, "-m", "memtriage", "report", "runs", "--json", "--as-recorded"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    report = json.loads(again.stdout)
    assert report["ranks"] == {"seen": 2, "of": 2}
    assert (report["verdict"], report["steps"]) == ("leak", 20)
    (finding,) = [finding for finding in report["findings"] if finding["kind"] == "leak"]
    assert (finding["rank"], finding["bytes_per_step"]) == (1, 256 << 10)
    assert "KEPT[*]" in finding["holder"]
    marks = {(mark["name"], mark["rank"]) for mark in report["marks"]}
    assert {(name, rank) for name in ("prepare", "save") for rank in (0, 1)} <= marks
