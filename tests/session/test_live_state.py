"""Where a watch stands: figures of the last marks, counters of a simulated GPU, no work for the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memtriage.model.blocks import DeviceCounters
from memtriage.model.findings import Finding
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.marks import Mark
from memtriage.model.position import TrainingPosition
from memtriage.model.run_status import MOST_NAMES, RunStatus
from memtriage.observe import cuda
from memtriage.observe.counters import Reading
from memtriage.session import core, live_state
from memtriage.session.core import Session
from memtriage.session.live_state import LiveState
from memtriage.session.marks import MarkPoint
from memtriage.store.layout import RankIdentity
from support import censuses

GIB = 1 << 30


def on_gpu(allocated: int, reserved: int = 8 * GIB, split: int = 2 * GIB) -> Reading:
    counters = DeviceCounters(
        allocated=allocated, reserved=reserved, requested=allocated - 5, peak_allocated=allocated + GIB,
        inactive_split=split,
    )  # fmt: skip
    return Reading("cuda:0", counters.allocated, counters.reserved, counters.requested, 600, counters)


class Machine:
    """The host and the GPU as the live state reads them; notes what was asked of the device."""

    def __init__(self) -> None:
        self.now = 50.0
        self.expandable = False
        self.fraction: int | None = None
        self.host_readings = 0
        self.cost = 0.02

    def read_host(self) -> Any:
        self.host_readings += 1
        self.now += self.cost
        rows = [LedgerRow(row="libraries", bytes=self.host_readings), LedgerRow(row="stacks", bytes=7)]
        ledger = Ledger(device="host", total=0, source="", rows=rows)

        class Reading:
            def ledger(self, storages: None) -> Ledger:
                return ledger

        return Reading()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(live_state.time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(live_state, "read_host", made.read_host)
    monkeypatch.setattr(live_state.cuda, "expandable_segments", lambda: made.expandable)
    monkeypatch.setattr(live_state.cuda, "per_process_limit", lambda device: made.fraction)
    monkeypatch.setattr(live_state.cuda, "capacity", lambda device: 80 * GIB)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("metrics asked for a snapshot, or for counters")

    for name in ("segments", "counters"):
        monkeypatch.setattr(cuda, name, forbidden)
    return made


@pytest.fixture
def live() -> LiveState:
    return LiveState(3, 1_700_000_000.0)


def marked(
    live: LiveState, name: str, time_s: float, step: int, microbatch: int, readings: list[Reading]
) -> None:
    live.at_mark(MarkPoint(name, TrainingPosition(step=step, microbatch=microbatch, time_s=time_s), readings))


def stands(live: LiveState, growing: dict[str, float] | None = None) -> RunStatus:
    live.growth(growing or {}, {})
    (found,) = live.statuses()
    return found


def latest(found: RunStatus) -> dict[str, Mark]:
    return {mark.device: mark for mark in found.latest}


def test_nothing_is_known_before_the_first_mark(live: LiveState) -> None:
    assert live.statuses() == []


def test_figures_are_those_of_the_last_mark(machine: Machine, live: LiveState) -> None:
    marked(live, "backward", 1.0, 0, 1, [Reading("cpu", 5, 9), on_gpu(3 * GIB)])
    marked(live, "step", 2.5, 1, 1, [Reading("cpu"), on_gpu(4 * GIB)])
    position = stands(live)
    assert (position.rank, position.steps, position.marked_at) == (3, 1, 1_700_000_002.5)
    gpu = latest(position)["cuda:0"]
    assert (gpu.allocated, gpu.reserved, gpu.requested, gpu.outside) == (4 * GIB, 8 * GIB, 4 * GIB - 5, 600)
    assert gpu.name == "step"
    assert latest(position)["cpu"].allocated == 5  # malloc was not read at the later one
    assert position.peak_allocated == {"cuda:0": 5 * GIB}
    at = {(mark.name, mark.device): mark.allocated for mark in position.named}
    assert at == {("backward", "cpu"): 5, ("backward", "cuda:0"): 3 * GIB, ("step", "cuda:0"): 4 * GIB}


def test_stranded_is_the_allocators_own_counter(machine: Machine, live: LiveState) -> None:
    live.ledgers([ledger_with(GIB)], 0.5)
    marked(live, "step", 1.0, 1, 1, [Reading("cpu", 5, 9), on_gpu(3 * GIB, split=2 * GIB)])
    assert stands(live).stranded == {"cuda:0": 2 * GIB}


def test_with_expandable_segments_stranded_is_the_last_ledgers(machine: Machine, live: LiveState) -> None:
    machine.expandable = True
    marked(live, "step", 1.0, 1, 1, [Reading("cpu", 5, 9), on_gpu(3 * GIB, split=0)])
    assert stands(live).stranded == {}
    live.ledgers([ledger_with(GIB), Ledger(device="host", total=0, source="", rows=[])], 1.5)
    position = stands(live)
    assert position.stranded == {"cuda:0": 2 * GIB}  # of both pools
    assert position.ledgers_at == 1_700_000_001.5


def ledger_with(stranded: int) -> Ledger:
    rows = [LedgerRow(row="stranded", bytes=stranded), LedgerRow(row="stranded", bytes=GIB, detail="a pool")]
    return Ledger(device="cuda:0", total=stranded + GIB, source="", rows=rows)


def test_limits_are_the_cap_or_the_device_and_the_hosts(machine: Machine, live: LiveState) -> None:
    marked(live, "step", 1.0, 1, 1, [Reading("cpu", 5, 9), on_gpu(GIB)])
    limits = stands(live).limits
    assert limits.keys() == {"cuda:0", "host"} and limits["cuda:0"] == 80 * GIB and limits["host"] > 0
    machine.fraction = 20 * GIB
    assert stands(live).limits["cuda:0"] == 20 * GIB


def test_classes_of_host_memory_are_read_when_asked_and_seldom(machine: Machine, live: LiveState) -> None:
    marked(live, "step", 1.0, 1, 1, [])
    assert machine.host_readings == 0
    for _ in range(100):
        assert stands(live).host_classes == {"libraries": 1, "stacks": 7}
    machine.now += machine.cost / 0.002
    assert stands(live).host_classes == {"libraries": 2, "stacks": 7}


def test_growth_is_what_the_watch_told_last(machine: Machine, live: LiveState) -> None:
    marked(live, "step", 1.0, 20, 1, [on_gpu(GIB)])
    assert stands(live, {"cuda:0": 4096.0, "cuda:1": 0.0}).growth == {"cuda:0": 4096.0, "cuda:1": 0.0}
    assert stands(live, {"cuda:0": 0.0}).growth == {"cuda:0": 0.0}


# --- of a session -------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session that has begun and takes no census."""
    censuses.leave_out(monkeypatch)
    who = RankIdentity(run_id="run", restart=0, rank=None, world_size=1, local_rank=None)
    made = Session(tmp_path, who, ["train.py"], str(tmp_path))
    made.start()
    yield made
    made.finish()


def train(steps: int) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()


def test_a_session_tells_where_training_stands(session: Session) -> None:
    train(2)
    (found,) = session.statuses()
    assert (found.steps, found.rank) == (2, None)
    assert {"start", "backward", "step"} <= {mark.name for mark in found.named}
    assert found.host_rss is not None and found.host_rss > 0
    assert sum(found.host_classes.values()) > 0.5 * found.host_rss
    assert found.growth == {}  # two steps tell nothing


def test_it_tells_what_has_been_found_to_grow(session: Session) -> None:
    leak = Finding(kind="leak", device="cpu", bytes_per_step=4096, holder="train.kept[*]")
    session._report_suspects([leak])
    (found,) = session.statuses()
    assert found.leaks == (leak,)


def test_nothing_is_told_once_it_has_ended(session: Session) -> None:
    session.finish()
    assert session.statuses() == []


def test_a_long_mark_of_the_program_does_not_hold_up_who_asks(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_STATUS_WAIT_S", 0.001)
    train(12)
    answered: list[list[RunStatus]] = []
    with session._lock:  # as in a census
        asking = threading.Thread(target=lambda: answered.append(session.statuses()))
        asking.start()
        asking.join(timeout=30)
    ((found,),) = answered
    assert found.steps == 12
    assert found.growth == {}  # not told while the lock is held
    (found,) = session.statuses()
    assert "cpu" in found.growth
    assert found.passing == {}  # which on a CPU has no counter


def test_what_fails_is_a_note_and_not_an_error_of_the_scrape(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LiveState) -> list[RunStatus]:
        raise OSError("no /proc")

    monkeypatch.setattr(LiveState, "statuses", fail)
    assert session.statuses() == []
    assert "no /proc" in session.path.read_text()


def test_scrapes_and_marks_may_come_at_once(machine: Machine, live: LiveState) -> None:
    """Every answer is of one mark: its figures belong together."""
    stop = threading.Event()

    def marks() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            name = f"mark {number % (2 * MOST_NAMES)}"
            marked(live, name, float(number), number, 0, [on_gpu(number * 512, reserved=number * 1024)])

    marked(live, "start", 0.0, 0, 0, [on_gpu(0, reserved=0)])
    worker = threading.Thread(target=marks)
    worker.start()
    try:
        for _ in range(100):
            position = stands(live)
            for mark in (*position.latest, *position.named):
                assert (mark.allocated, mark.reserved) == (mark.step * 512, mark.step * 1024)
    finally:
        stop.set()
        worker.join()


def test_counters_without_a_peak_or_split_have_none(machine: Machine, live: LiveState) -> None:
    marked(live, "step", 1.0, 1, 1, [Reading("cuda:0", 1, 2, None, None, DeviceCounters())])
    found = stands(live)
    assert (found.peak_allocated, found.stranded, latest(found)["cuda:0"].allocated) == ({}, {}, 1)
