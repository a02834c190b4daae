"""A batch that will not fit is reported before it comes, with its step; nothing is reported of one that fits.

The GPU is a counter: what a step needs is computed from the size of its batch, as one was recorded.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from memtriage.model.blocks import DeviceCounters
from memtriage.model.position import TrainingPosition
from memtriage.model.units import MIB
from memtriage.observe.counters import Reading
from memtriage.session import batch_watch
from memtriage.session.batch_watch import BatchWatch, FollowPolicy
from memtriage.session.death_watch import BatchPolicy
from memtriage.session.marks import MarkPoint
from memtriage.session.record import SessionRecord

torch = pytest.importorskip("torch")
data = torch.utils.data

GIB = 1024 * MIB
_LONGEST = 4096
_AT = 300
"""The longest item."""


class Texts(data.Dataset):  # type: ignore[misc, name-defined]
    """512 texts, of which one is much longer."""

    def __init__(self, longest: int = _LONGEST) -> None:
        draw = random.Random(0)
        self.lengths = [draw.randint(64, 900) for _ in range(512)]
        self.lengths[_AT] = longest

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(self.lengths[index])


def padded(items: list[Any]) -> Any:
    return torch.nn.utils.rnn.pad_sequence(items, batch_first=True)


@dataclass
class Gpu:
    """A GPU on which a step keeps `saved` bytes for its backward and needs `peak`, by items and length."""

    limit: int
    weights: int = 2 * GIB
    saved: Callable[[int, int], int] = lambda items, length: items * length * 300_000
    peak: Callable[[int, int], int] = lambda items, length: items * length * 500_000
    leaks: int = 0
    allocated: int = 0
    highest: int = 0
    died_at: int | None = None
    said: list[str] = field(default_factory=list)

    def counters(self, device: int) -> DeviceCounters:
        return DeviceCounters(allocated=self.allocated, peak_allocated=self.highest)


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    """Trains on a GPU, and returns the findings at the end."""
    monkeypatch.setattr(batch_watch, "POLICY", FollowPolicy(lengths_share=1e9))
    monkeypatch.setattr(batch_watch, "BATCHES", BatchPolicy(apart_s=0, share=1e9))
    monkeypatch.setattr(batch_watch.cuda, "initialized", lambda: True)
    monkeypatch.setattr(batch_watch.cuda, "devices", lambda: [0])
    watches = []

    def train(
        gpu: Gpu, loaders: Any, *, steps: int = 10_000, accumulate: int = 1, backwards: int = 1
    ) -> list[Any]:
        monkeypatch.setattr(batch_watch.cuda, "counters", gpu.counters)
        monkeypatch.setattr(batch_watch, "device_limit", lambda device: gpu.limit)
        record = SessionRecord(tmp_path / "rank.jsonl")
        watch = BatchWatch(3, record, gpu.said.append)
        watches.append(watch)
        watch.install()
        position = TrainingPosition()
        base = gpu.weights
        for batch in (batch for loader in loaders for batch in loader):
            items, length = batch.shape
            for _ in range(backwards):
                gpu.allocated = base + gpu.saved(items, length)
                watch.backward_begins(batch.numel())
                gpu.highest = max(gpu.highest, base + gpu.peak(items, length))
                position = TrainingPosition(
                    step=position.step, microbatch=position.into_step + 1, microbatches_per_step=accumulate
                )
            if gpu.highest > gpu.limit:
                gpu.died_at = position.step + 1
                break
            if position.microbatch < accumulate:
                continue
            base += gpu.leaks
            gpu.allocated = base
            position = TrainingPosition(
                step=position.step + 1, microbatches_per_step=accumulate, at_step_end=True
            )
            reading = Reading("cuda:0", gpu.allocated, counters=gpu.counters(0))
            watch.at_mark(MarkPoint("step", position, [Reading("cpu", 1, 2), reading]))
            if position.step == steps:
                break
        found = watch.findings(position)
        record.close()
        notes = [line for line in (tmp_path / "rank.jsonl").read_text().splitlines() if '"note"' in line]
        assert notes == []
        return found

    yield train
    for watch in watches:
        watch.remove()


def loader(dataset: Any = None, **arguments: Any) -> Any:
    arguments = {"batch_size": 4} | arguments
    return data.DataLoader(dataset or Texts(), collate_fn=padded, **arguments)


def step_of(found: list[Any]) -> int:
    (finding,) = found
    assert (finding.kind, finding.certainty, finding.device) == ("out_of_memory", "suspected", "cuda:0")
    assert finding.rank == 3
    step: int = finding.projection.step
    return step


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("shuffle", "steps"), [(False, 60), (True, 120)])
def test_the_step_is_known_long_before_it_comes(
    train: Callable[..., list[Any]], shuffle: bool, steps: int, accumulate: int
) -> None:
    torch.manual_seed(17)  # of an order in which the longest is late
    gpu = Gpu(limit=8 * GIB)
    train(gpu, [loader(shuffle=shuffle)], accumulate=accumulate)
    torch.manual_seed(17)
    steps //= accumulate
    assert gpu.died_at is not None and gpu.died_at > steps
    (said,) = gpu.said
    assert f"step {gpu.died_at:,} " in said
    found = train(Gpu(limit=8 * GIB), [loader(shuffle=shuffle)], steps=steps, accumulate=accumulate)
    assert step_of(found) == gpu.died_at
    assert found[0].bytes == pytest.approx(2 * GIB + 4 * _LONGEST * 500_000, rel=0.02)


def test_nothing_is_said_of_batches_that_fit(train: Callable[..., list[Any]]) -> None:
    gpu = Gpu(limit=2 * GIB + 4 * _LONGEST * 500_000)
    assert train(gpu, [loader()], steps=50) == []
    assert gpu.died_at is None and gpu.said == []


def test_a_warning_ends_with_its_batch(train: Callable[..., list[Any]]) -> None:
    """Here the collator shortens items."""

    def cut(items: list[Any]) -> Any:
        return padded([item[:700] for item in items])

    gpu = Gpu(limit=4 * GIB, peak=lambda items, length: items * length * 310_000)
    assert train(gpu, [data.DataLoader(Texts(), batch_size=4, collate_fn=cut)]) == []
    assert gpu.died_at is None


def test_a_leak_does_not_hide_the_law_and_counts_as_used(train: Callable[..., list[Any]]) -> None:
    gpu = Gpu(limit=8 * GIB, leaks=20 * MIB)
    found = train(gpu, [loader()], steps=40)
    assert step_of(found) == _AT // 4 + 1
    assert found[0].bytes == pytest.approx(2 * GIB + 40 * 20 * MIB + 4 * _LONGEST * 500_000, rel=0.02)


def test_what_was_learned_serves_the_next_epoch(train: Callable[..., list[Any]]) -> None:
    one, first = loader(Texts(longest=900)), 512 // 4

    def grown() -> Iterator[Any]:
        yield from one
        one.dataset.lengths[_AT] = _LONGEST  # of a curriculum, for example
        yield from one

    gpu = Gpu(limit=8 * GIB)
    assert step_of(train(gpu, [grown()], steps=first + 1)) == first + _AT // 4 + 1
    assert len(gpu.said) == 1


def test_a_loader_that_is_read_between_is_not_mistaken_for_it(train: Callable[..., list[Any]]) -> None:
    evaluation = loader(Texts(longest=20_000))

    def epoch() -> Iterator[Any]:
        for number, batch in enumerate(loader()):
            if number % 10 == 0:
                for _ in evaluation:
                    pass
            yield batch

    assert step_of(train(Gpu(limit=8 * GIB), [epoch()], steps=45)) == _AT // 4 + 1


def test_batches_that_are_read_ahead_are_known_by_their_place(train: Callable[..., list[Any]]) -> None:
    def ahead() -> Iterator[Any]:
        batches = iter(loader())
        waiting = [next(batches) for _ in range(3)]
        for batch in batches:
            waiting.append(batch)
            yield waiting.pop(0)

    assert step_of(train(Gpu(limit=8 * GIB), [ahead()], steps=40)) == _AT // 4 + 1


class Drawn(data.Sampler):  # type: ignore[misc, name-defined]
    """Each item once, in an order that is drawn as it goes; the longest one late."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(512))
        while left:
            place = int(torch.randint(len(left), ()))
            yield left.pop(place if left[place] != _AT or len(left) < 20 else place - 1)


class DrawnBatches(Drawn):
    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        for _ in range(128):
            yield torch.randint(512, (4,)).tolist()


def test_of_a_random_order_the_longest_batch_is_known_but_not_its_step(
    train: Callable[..., list[Any]],
) -> None:
    torch.manual_seed(0)
    gpu = Gpu(limit=6 * GIB)
    (finding,) = train(gpu, [loader(sampler=Drawn())], steps=60)
    assert finding.projection.step is None
    assert finding.mechanism.startswith("the longest batch will not fit: 4 x 4,096 elements")
    assert gpu.said[0].startswith("the longest batch will not fit")


def test_of_a_random_order_nothing_is_said_once_the_longest_has_come(
    train: Callable[..., list[Any]],
) -> None:
    """It fits here, as the collator shortens it."""

    def cut(items: list[Any]) -> Any:
        return padded([item[: len(item) if len(item) <= 900 else 64] for item in items])

    one = data.DataLoader(Texts(), batch_size=4, sampler=Drawn(), collate_fn=cut)
    gpu = Gpu(limit=6 * GIB)
    assert train(gpu, [one, one]) == []
    assert len(gpu.said) == 1


def test_batches_of_other_sizes_than_the_items_explain_are_not_understood(
    train: Callable[..., list[Any]],
) -> None:
    def longer(items: list[Any]) -> Any:
        return torch.nn.functional.pad(padded(items), (0, 7000))

    one = data.DataLoader(Texts(), batch_size=4, sampler=Drawn(), collate_fn=longer)
    assert train(Gpu(limit=90 * GIB), [one], steps=60) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 1, "batch_sampler": DrawnBatches()},
        {"dataset": [torch.zeros(100)] * 400},
        {"dataset": data.TensorDataset(torch.zeros(400, 9))},
    ],
)
def test_nothing_is_said_where_the_batches_to_come_are_not_known(
    train: Callable[..., list[Any]], arguments: dict[str, Any]
) -> None:
    if isinstance(arguments.get("dataset"), data.TensorDataset):
        one = data.DataLoader(arguments["dataset"], batch_size=4, collate_fn=lambda items: items[0][0][None])
    else:
        one = loader(**arguments)
    assert train(Gpu(limit=8 * GIB), [one], steps=40) == []


def test_several_backwards_per_batch_are_not_understood(train: Callable[..., list[Any]]) -> None:
    assert train(Gpu(limit=8 * GIB), [loader()], steps=60, backwards=2, accumulate=2) == []


def test_a_failure_is_noted_once_and_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def fail(epoch: Any) -> Any:
        calls.append(epoch)
        raise RuntimeError("a column that cannot be read")

    monkeypatch.setattr(batch_watch.Epoch, "plan", fail)
    record = SessionRecord(tmp_path / "rank.jsonl")
    watch = BatchWatch(None, record, lambda text: None)
    watch.install()
    for _ in range(3):
        for _ in loader():
            watch.backward_begins(None)
    watch.remove()
    record.close()
    notes = [json.loads(line) for line in (tmp_path / "rank.jsonl").read_text().splitlines()]
    assert ["a column that cannot be read" in note["text"] for note in notes] == [True]
    assert len(calls) == 1


_SCRIPT = """
import resource
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    def __init__(self, longest):
        self.lengths = torch.randint(64, 512, (800,)).tolist()
        self.lengths[700] = longest

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.zeros(self.lengths[index], dtype=torch.long)


torch.manual_seed(17)
model = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.Adam(model.parameters())
with open("/proc/self/statm") as statm:
    data = int(statm.read().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (data + (400 << 20), resource.RLIM_INFINITY))
pad = lambda items: nn.utils.rnn.pad_sequence(items, batch_first=True)
for step, batch in enumerate(DataLoader(Texts(int(sys.argv[1])), batch_size=8, collate_fn=pad), 1):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 60:
        break
"""


@pytest.mark.parametrize(("longest", "expected"), [(30_000, [88]), (600, [])])
def test_under_a_limit_on_the_host(longest: int, expected: list[int], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    command = [sys.executable, "-m", "memtriage", "run", "--json", "run.json", "-o", "run"]
    done = subprocess.run(
        [*command, "train.py", str(longest)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run.json").read_text())
    ahead = [finding for finding in report["findings"] if finding["kind"] == "out_of_memory"]
    assert [finding["projection"]["step"] for finding in ahead] == expected
    assert [finding["device"] for finding in ahead] == ["cpu"] * len(expected)
    printed = " ".join((done.stderr + done.stdout).split())
    assert ("cpu will be full at step 88" in printed) == bool(expected)
    assert report["verdict"] in ("clean", "not_judged")
