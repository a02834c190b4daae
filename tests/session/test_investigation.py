"""An investigation over a real heap: what grew between two censuses, who holds it, which line made it."""

from __future__ import annotations

import gc
import importlib.util
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memtriage.account.census import View
from memtriage.diagnose.leaks import CensusPoint
from memtriage.model.census import Census, StorageRecord
from memtriage.model.paths import in_words
from memtriage.session.investigation import Investigation, Investigator
from support.paths import of_module

torch = pytest.importorskip("torch")

PROGRAM = """
import torch
weight = torch.nn.Parameter(torch.ones(1000))
losses, seen, texts, nodes = [], [], [], []
seen_once = torch.zeros(1 << 20)

def step(number):
    global seen_once
    loss = (weight * torch.rand(1000)).sum()
    loss.backward()
    losses.append((weight * torch.rand(1000)).exp())
    seen.append(torch.zeros(50_000))
    texts.append(bytes(30_000) + str(number).encode())
    nodes.append([(weight + 1).grad_fn for _ in range(40)])
    seen_once = torch.zeros(1 << 20)
"""


class Told:
    """What one investigation of four steps brought, and what it said meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "train.py"
        self.file.write_text(PROGRAM)
        spec = importlib.util.spec_from_file_location("train", self.file)
        assert spec is not None and spec.loader is not None
        self.program = sys.modules["train"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.program)
        self.said: list[str] = []
        self.looked = 0
        self.investigator = Investigator(str(folder), self.said.append)

    def run(self) -> Investigation:
        for number in range(3):
            self._step(number)
        investigation = self.investigator.begin("step", 3)
        self.recording = [self.investigator.recording]
        for number in range(3, 7):
            self._step(number)
            if number < 6:
                self.investigator.record(6 - number)
                self.recording.append(self.investigator.recording)
        self.investigator.conclude(investigation, 7, self._look)
        return investigation

    def _step(self, number: int) -> None:
        self.program.step(number)

    def _look(self, view: Any) -> None:
        self.looked += 1
        assert view.graph.objects


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Told, Investigation]]:
    made = Told(tmp_path_factory.mktemp("investigation"))
    yield made, made.run()
    del sys.modules["train"]
    made.program.__dict__.clear()


def line_of(told: Told, text: str) -> str:
    lines = told.file.read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if text in line and "def " not in line]
    return f"train.py:{number} in step"


def test_what_grew_is_named_with_its_rate_and_its_line(told: tuple[Told, Investigation]) -> None:
    made, investigation = told
    growths = {in_words(growth.group.anchor): growth for growth in investigation.growths()}
    assert set(growths) == {"train.losses[*]", "train.seen[*]"}
    assert growths["train.seen[*]"].rate == 200_000
    assert (growths["train.seen[*]"].count, growths["train.seen[*]"].distance) == (4, 4)
    assert growths["train.losses[*]"].group.attached
    details = {in_words(anchor): detail for (_, anchor), detail in investigation.details.items()}
    assert details["train.seen[*]"].holder_kind == "list"
    assert details["train.seen[*]"].entries == 7
    assert details["train.seen[*]"].retained == 7 * 200_000
    assert details["train.seen[*]"].allocated_at == line_of(made, "seen.append(")
    assert details["train.losses[*]"].allocated_at == line_of(made, "losses.append(")
    assert details["train.losses[*]"].stored_at == line_of(made, "losses.append(")


def test_growing_data_of_the_host_is_named(told: tuple[Told, Investigation]) -> None:
    made, investigation = told
    by_holder = {in_words(growth.path): growth for growth in investigation.host}
    texts = by_holder["train.texts[*]"]
    assert (texts.kind, texts.steps) == ("list", 4)
    assert texts.nbytes == pytest.approx(4 * 30_000, rel=0.02)
    assert texts.allocated_at == texts.stored_at == line_of(made, "texts.append(")
    assert "train.seen[*]" not in by_holder


def test_what_only_c_plus_plus_sees_is_counted_by_its_holder(told: tuple[Told, Investigation]) -> None:
    _, investigation = told
    nodes = {
        in_words(holder.path): holder for holder in investigation.native if holder.what == "autograd nodes"
    }
    kept = [holder for name, holder in nodes.items() if name.startswith("train.nodes[*]")]
    assert kept and kept[0].more >= 4 * 40


def test_recorders_run_for_the_last_two_steps_only(told: tuple[Told, Investigation]) -> None:
    made, investigation = told
    assert made.recording == [False, False, True, True]
    assert not made.investigator.recording
    assert not tracemalloc.is_tracing()
    assert not torch.is_anomaly_enabled()
    assert not investigation.collector_off


def test_it_says_what_takes_time_and_how_much_it_took(told: tuple[Told, Investigation]) -> None:
    made, investigation = told
    assert made.said == ["taking a census"]  # once, though there were two
    assert made.looked == 1
    assert made.investigator.seconds >= sum(point.census.seconds for point in investigation.points) > 0
    assert [point.interrupted for point in investigation.points] == [False, False]
    assert ("cpu", of_module("train", "seen_once")) in investigation.points[0].heads


def test_a_census_amid_a_failure_reads_nothing_from_devices(told: tuple[Told, Investigation]) -> None:
    made, _ = told
    point = made.investigator.census(9, None, ())
    assert point.interrupted and point.heads == {}
    assert {"train.seen[*]"} <= {in_words(group.anchor) for group in point.census.groups}


def test_memory_that_runs_out_in_the_very_next_step_is_looked_at_closer(
    told: tuple[Told, Investigation],
) -> None:
    made, _ = told
    investigation = made.investigator.begin("step", 9)
    made._step(9)
    made.investigator.conclude(investigation, 9, None, ())
    growths = {in_words(growth.group.anchor): growth for growth in investigation.growths()}
    assert growths["train.seen[*]"].rate == 200_000
    assert "train.texts[*]" in {in_words(growth.path) for growth in investigation.host}


def test_too_little_memory_for_a_closer_look_loses_no_growth(
    told: tuple[Told, Investigation], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: Any) -> None:
        raise MemoryError

    made, _ = told
    investigation = made.investigator.begin("step", 11)
    made._step(11)
    monkeypatch.setattr(View, "details", no_memory)
    made.investigator.conclude(investigation, 12)
    assert "train.seen[*]" in {in_words(growth.group.anchor) for growth in investigation.growths()}
    assert investigation.details == {}


def test_recorders_of_others_stay_on() -> None:
    tracemalloc.start(1)
    torch.set_anomaly_enabled(True, True)
    try:
        investigator = Investigator(None, lambda text: None)
        investigator.record(2)
        investigator.record(1)
        investigator.in_backward(True)
        investigator.stop()
        assert tracemalloc.is_tracing() and tracemalloc.get_traceback_limit() == 1
        assert torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    finally:
        tracemalloc.stop()
        torch.set_anomaly_enabled(False)


def test_while_nodes_are_traced_a_backward_is_not() -> None:
    investigator = Investigator(None, lambda text: None)
    try:
        investigator.record(1)
        assert torch._C.is_anomaly_enabled() and not torch._C.is_anomaly_check_nan_enabled()
        investigator.in_backward(True)
        assert not torch._C.is_anomaly_enabled()
        investigator.in_backward(False)
        assert torch._C.is_anomaly_enabled()
    finally:
        investigator.stop()
    assert not torch._C.is_anomaly_enabled() and torch._C.is_anomaly_check_nan_enabled()


def test_a_collector_that_was_off_all_the_time_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Census(storages=[], groups=[], nodes_by_anchor={}, objects=0, nodes=0, seconds=0.0)
    monkeypatch.setattr(
        Investigator, "census", lambda self, position, also=None, frames=None: CensusPoint(position, nothing)
    )
    investigator = Investigator(None, lambda text: None)
    gc.disable()
    try:
        off, back_on = investigator.begin("step", 1), investigator.begin("step", 2)
        investigator.conclude(off, 5)
        gc.enable()
        investigator.conclude(back_on, 6)
    finally:
        gc.enable()
    assert off.collector_off
    assert not back_on.collector_off


def test_what_awaits_the_collector_is_known_in_bytes() -> None:
    def point(position: int, *garbage: int) -> CensusPoint:
        records = [
            StorageRecord(device="cpu", address=1, nbytes=nbytes, owner="garbage") for nbytes in garbage
        ]
        records.append(StorageRecord(device="cpu", address=2, nbytes=900, owner="variable"))
        return CensusPoint(
            position,
            Census(storages=records, groups=[], nodes_by_anchor={}, objects=0, nodes=0, seconds=0.0),
        )

    points = [point(1, 100, 50), point(5, 20)]
    assert Investigation("step", points).garbage_bytes("cpu") == 150
    assert Investigation("step", points).garbage_bytes("cuda:0") == 0
    assert Investigation("step", points, collector_off=True).garbage_bytes("cpu") == 0


@pytest.mark.parametrize(
    ("garbage", "grows"),
    [
        pytest.param([(3, 40), (9, 100), (13, 140)], True, id="ten a step"),
        pytest.param([(3, 40), (9, 46), (13, 50)], True, id="one a step"),
        pytest.param([(3, 43), (9, 39), (13, 43)], False, id="by chance"),
        pytest.param([(3, 40), (9, 100), (13, 60)], False, id="collected"),
        pytest.param([(3, 100), (9, 40), (13, 90)], False, id="collected before"),
    ],
)
def test_garbage_grows_where_it_comes_with_every_position(
    garbage: list[tuple[int, int]], grows: bool
) -> None:
    baseline, *points = [
        CensusPoint(
            position,
            Census(
                storages=[], groups=[], nodes_by_anchor={}, objects=0, nodes=0, seconds=0.0, garbage=count
            ),
        )
        for position, count in garbage
    ]
    assert Investigation("step", points, baseline=baseline).garbage_grows() is grows
    assert not Investigation("step", points, baseline=baseline, collector_off=True).garbage_grows()
