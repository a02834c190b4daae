"""Several ranks under a launcher, on the CPU: one report, which names the rank that is to blame."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
ENV = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
ENV["OMP_NUM_THREADS"] = "1"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [
    "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
]  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What came of a launched job."""

    folder: Path
    status: int
    report: dict[str, Any]
    stdout: str
    stderr: str


def launch(folder: Path, launcher: list[str], source: str) -> Job:
    (folder / "train.py").write_text(textwrap.dedent(source))
    result = folder / "report.json"
    watch = ["-m", "memtriage", "run", "-o", str(folder / "runs"), "--json", str(result)]
    done = subprocess.run(
        [sys.executable, *launcher, *watch, "train.py"],
        cwd=folder, env=ENV, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert result.exists(), done.stderr[-4000:]
    return Job(folder, done.returncode, json.loads(result.read_text()), done.stdout, done.stderr)


def report_again(job: Job) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "memtriage",
        "report",
        str(job.folder / "runs"),
        "--json",
        "--as-recorded",
    ]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=60, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def steps_of(report: dict[str, Any]) -> dict[int, int]:
    """Last step by rank."""
    return {mark["rank"]: mark["step"] for mark in report["marks"]}


# --- distributed data parallel ------------------------------------------------------------------------------

DDP = """
    import torch
    import torch.distributed as dist
    from torch import nn

    def main():
        dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank())
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)))
        optimizer = torch.optim.AdamW(model.parameters())
        history = []
        for step in range(24):
            x = torch.randn(256, 64)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 1:
                history.append(x)
        dist.destroy_process_group()
        print("trained")

    main()
"""


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return launch(tmp_path_factory.mktemp("ddp"), TORCHRUN, DDP)


def test_a_leak_on_one_rank_names_it(ddp: Job) -> None:
    assert ddp.status == 0
    assert ddp.report["verdict"] == "leak"
    (leak,) = [finding for finding in ddp.report["findings"] if finding["kind"] == "leak"]
    assert (leak["rank"], leak["device"], leak["holder"]) == (1, "cpu", "frame main(): history[*]")
    assert 0 <= leak["bytes_per_step"] - 256 * 64 * 4 <= 1024  # and a tensor object of its own
    assert leak["allocated_at"] == "train.py:13 in main"
    others = [finding for finding in ddp.report["findings"] if finding is not leak]
    assert {(finding["kind"], finding["rank"]) for finding in others} <= {("rank_differs", 1)}


def test_rank_zero_prints_one_merged_report(ddp: Job) -> None:
    assert ddp.report["ranks"] == {"seen": 2, "of": 2}
    assert steps_of(ddp.report) == {0: 24, 1: 24}
    assert ddp.stderr.count("LEAK") == 1
    assert "2 of 2 ranks" in ddp.stderr
    assert ddp.stdout.count("trained") == 2  # the ranks' lines may run into each other
    files = sorted(path.name for path in ddp.folder.glob("runs/*/0/*"))
    assert files == ["rank-00000.jsonl", "rank-00001.jsonl"]


def test_the_directory_gives_the_same_report(ddp: Job) -> None:
    assert report_again(ddp) == ddp.report


# --- a rank that dies ---------------------------------------------------------------------------------------

# Rank 1 waits until rank 0 has come as far as it will; rank 0 waits for what the launcher does then.
DYING = """
    import os, signal, sys
    import memtriage

    rank = int(os.environ["RANK"])
    for step in range(6 - rank):
        memtriage.step()
    assert "torch" not in sys.modules
    if rank == 0:
        with open("fifo", "w") as fifo:
            fifo.write("here")
        signal.pause()
    with open("fifo") as fifo:
        assert fifo.read() == "here"
    END
"""


@pytest.mark.parametrize(
    ("end", "again"), [("sys.exit(1)", "not_judged"), ("os.kill(os.getpid(), signal.SIGKILL)", "killed")]
)
def test_when_one_rank_dies_the_report_still_comes(tmp_path: Path, end: str, again: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    job = launch(tmp_path, TORCHRUN, DYING.replace("END", end))
    assert job.status == 1
    assert job.report["verdict"] == "not_judged"
    assert job.report["exception"] == "terminated by SIGTERM"
    assert job.report["ranks"] == {"seen": 2, "of": 2}
    assert steps_of(job.report) == {0: 6, 1: 5}
    assert job.stderr.count("NOT JUDGED") == 1
    assert report_again(job)["verdict"] == again


# --- another launcher ---------------------------------------------------------------------------------------

STEPS = """
    import memtriage

    for step in range(5):
        memtriage.step()
"""


def test_accelerate_launches_watched_ranks(tmp_path: Path) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    job = launch(tmp_path, ACCELERATE, STEPS)
    assert (job.status, job.report["verdict"]) == (0, "not_judged")
    assert job.report["ranks"] == {"seen": 2, "of": 2}
    assert steps_of(job.report) == {0: 5, 1: 5}
    assert job.stderr.count("NOT JUDGED") == 1
