"""Ray Train's workers, watched: one run directory, findings that name the rank, nothing changed."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from memtriage.diagnose.ranks.merge import merge
from memtriage.model.report import RunReport
from memtriage.process import active
from memtriage.store.reader import read_run

# Ray is imported by the tests that run only: it takes seconds, in every process that collects this file.
if not (find_spec("torch") and find_spec("ray")):
    pytest.skip("needs torch and ray[train]", allow_module_level=True)

STEPS = 16
KIB = 1024


@pytest.fixture(autouse=True)
def interrupts_as_before() -> Iterator[None]:
    """Ray Train's controller leaves a handler of its own behind, after which Ctrl-C raises nothing."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def leaking_loop(config: dict[str, Any]) -> None:
    """Trains a small model; the rank `leaks` keeps 512 KiB of every step."""
    import ray.train
    import torch

    rank = ray.train.get_context().get_world_rank()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    history = []
    for _ in range(config["steps"]):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == config.get("leaks"):
            history.append(torch.zeros(512 * KIB, dtype=torch.uint8))
    if rank == config.get("fails"):
        raise ValueError("no such layer")


def watched(loop: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    from memtriage.integrations.ray import watched

    return watched(loop, **options)


def fit(loop: Any, storage: Path, workers: int, **config: Any) -> Any:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        loop,
        train_loop_config={"steps": STEPS, **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=str(storage), name="job"),
    )
    return trainer.fit()


def report_of(storage: Path) -> RunReport:
    """What `memtriage report` says of the run in the trainer's storage."""
    return merge(read_run([storage / "job" / "memtriage"]))


def test_the_rank_that_leaks_is_named_over_one_directory(ray_cluster: Any, tmp_path: Path) -> None:
    fit(watched(leaking_loop), tmp_path, 2, leaks=1)
    report = report_of(tmp_path)
    assert report.verdict == "leak"
    assert (report.ranks.seen, report.ranks.of) == (2, 2)
    assert report.steps == STEPS
    (leak,) = [finding for finding in report.findings if finding.kind == "leak"]
    assert (leak.rank, leak.device) == (1, "cpu")
    assert leak.bytes_per_step == pytest.approx(512 * KIB, rel=0.05)
    assert leak.holder is not None and "history[*]" in leak.holder and "thread" not in leak.holder
    # The line that allocates is recorded over two steps before a census, and 16 may be too few for that.
    assert leak.stored_at is not None and leak.stored_at.startswith("test_ray.py:")
    assert {mark.rank for mark in report.marks if mark.name == "step"} == {0, 1}
    assert {"train begin", "train end"} <= {mark.name for mark in report.marks}


# Ray's local mode: the same trainer and context, in this process


def test_an_error_of_the_loop_passes_through_unchanged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such layer") as raised:
        fit(watched(leaking_loop, directory=tmp_path), tmp_path, 0, fails=0)
    assert raised.value.__cause__ is None and raised.value.__context__ is None
    report = merge(read_run([tmp_path]))
    assert report.exception == "ValueError: no such layer"
    assert (report.verdict, report.steps) == ("clean", STEPS)
    assert active.session is None


@pytest.mark.long
def test_records_go_where_they_are_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(watched(leaking_loop, directory=tmp_path / "given"), tmp_path, 0, steps=1)
    assert len(read_run([tmp_path / "given"]).ranks) == 1
    monkeypatch.chdir(tmp_path)
    fit(watched(leaking_loop), tmp_path, 0, steps=1)
    assert len(read_run([tmp_path / "memtriage-run"]).ranks) == 1
    monkeypatch.setenv("MEMTRIAGE_DIR", str(tmp_path / "by environment"))
    fit(watched(leaking_loop), tmp_path, 0, steps=1)
    assert len(read_run([tmp_path / "by environment"]).ranks) == 1


def test_a_loop_without_config_returns_what_it_did(tmp_path: Path) -> None:
    def loop() -> str:
        """Its own words."""
        return "done"

    seen = watched(loop, directory=tmp_path)
    assert inspect.signature(seen) == inspect.signature(loop)
    assert (seen.__name__, seen.__doc__) == ("loop", "Its own words.")
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(seen, scaling_config=ScalingConfig(num_workers=0)).fit()
    (rank,) = read_run([tmp_path]).ranks
    assert rank.start.rank == 0 and rank.end is not None
