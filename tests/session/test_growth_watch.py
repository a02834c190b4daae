"""What a watch takes for itself must not look like growth of the program."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from memtriage.diagnose.growth.evidence import CODE, ENOUGH_MARKS, WARM_UP, Evidence
from memtriage.diagnose.growth.facts import JudgedDevice
from memtriage.diagnose.growth.judgment import judge
from memtriage.model.evidence import CensusSeen, Readings, Situation
from memtriage.model.findings import Finding
from memtriage.model.position import TrainingPosition
from memtriage.observe.counters import CounterReader, Reading
from memtriage.observe.malloc import malloc_info
from memtriage.session import growth_watch
from memtriage.session.growth_watch import GrowthWatch, ReadingPolicy
from memtriage.session.marks import MarkPoint
from memtriage.session.schedule.investigation import Investigator
from support import censuses

MIB = 1024**2
pytestmark = pytest.mark.skipif(malloc_info() is None, reason="no counter of malloc")


class WorkingScheduler:
    """Keeps memory, as censuses do, and switches a recorder on at every other mark and off at the next.

    What is in `garbage` is released at each mark, as if Python's collector ran then.
    """

    def __init__(self, evidence: Evidence, investigator: Investigator, *unused: object) -> None:
        self.investigator = investigator
        self.kept: list[object] = []
        self.values: list[Mapping[str, int]] = []
        self.works = True
        self.garbage: list[object] = []

    def at_mark(
        self, name: str, position: TrainingPosition, values: Mapping[str, int], *, works: bool
    ) -> None:
        self.values.append(values)
        self.garbage.clear()
        if not self.works:
            return
        self.kept.append(bytearray(4 * MIB))
        if position.step % 2:
            self.investigator.record(2)
        else:
            self.investigator.stop()


def watch_of(
    now: Callable[[], TrainingPosition],
    report: Callable[[list[Finding]], None] = lambda leaks: None,
    write: Callable[[Any], None] = lambda line: None,
    rank: int | None = None,
) -> GrowthWatch:
    progress: Any = SimpleNamespace(works=True, now=now)
    ledgers: Any = SimpleNamespace(before_census=None, take=None, is_due=lambda: False, other_memory={})
    return GrowthWatch(
        CounterReader(), progress, ledgers, script_root=None, say=lambda text: None,
        report=report, write=write, rank=rank, batches_vary=lambda: False,
    )  # fmt: skip


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrowthWatch]:
    monkeypatch.setattr(growth_watch, "CensusScheduler", WorkingScheduler)
    monkeypatch.setattr(growth_watch, "READING", ReadingPolicy(work_s=0.0))
    made = watch_of(TrainingPosition)
    made.install()
    gc.collect()  # what earlier tests left must not be freed between two marks
    yield made
    made.remove()


def idle(watch: GrowthWatch) -> Any:
    """Its scheduler, which does no work at marks."""
    scheduler: Any = watch.scheduler
    scheduler.works = False
    return scheduler


def mark(step: int) -> MarkPoint:
    info = malloc_info()
    assert info is not None
    return MarkPoint("backward", TrainingPosition(step=step), [Reading("cpu", allocated=info.in_use)])


def test_memory_that_the_watch_keeps_is_subtracted_while_recorders_run(watch: GrowthWatch) -> None:
    scheduler: Any = watch.scheduler
    traced: list[list[int]] = []
    for step in range(1, 9):
        traced = [[number] for number in range(20_000)]  # tracemalloc takes memory of malloc's for each
        watch.at_mark(mark(step))
    scheduler.works = False
    watch.at_mark(mark(9))
    read = [values["cpu"] for values in scheduler.values if "cpu" in values]
    assert len(traced) == 20_000
    assert len(scheduler.kept) == 8
    assert len(read) == 5  # malloc's counter is disturbed while a recorder is on
    assert max(read) - min(read) < MIB


def test_garbage_that_is_collected_during_a_census_is_no_growth(watch: GrowthWatch) -> None:
    scheduler = idle(watch)
    for step in range(1, 6):
        scheduler.garbage.append(bytearray(8 * MIB))
        watch.at_mark(mark(step))
    read = [values["cpu"] for values in scheduler.values]
    assert max(read) - min(read) < MIB


def reading(device: str, allocated: int | None) -> MarkPoint:
    return MarkPoint("own", TrainingPosition(step=1), [Reading(device, allocated=allocated)])


def test_a_counter_that_was_read_once_can_be_read(watch: GrowthWatch) -> None:
    for device, allocated in (("cuda:0", None), ("cuda:0", 5), ("cuda:0", None), ("cuda:1", None)):
        watch.at_mark(reading(device, allocated))
    judged = watch.judged().judged
    assert judged["cuda:1"] == JudgedDevice(obstacle="no counter") != judged["cuda:0"]


@pytest.mark.parametrize(
    ("name", "step", "vary", "code", "on_gpu", "is_read"),
    [
        pytest.param("step", 1, True, 4096, False, True, id="shapes vary"),
        pytest.param("backward", 0, True, 4096, False, True, id="without steps"),
        pytest.param("backward", 1, True, 4096, False, False, id="within a step"),
        pytest.param("step", 1, False, 4096, False, False, id="all batches of one size"),
        pytest.param("step", 1, None, 4096, False, True, id="sizes unknown"),
        pytest.param("step", 1, True, None, False, False, id="no counter"),
        pytest.param("step", 1, True, 4096, True, False, id="on a GPU"),
    ],
)
def test_generated_code_is_read_where_it_may_grow(
    watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch,
    name: str, step: int, vary: bool | None, code: int | None, on_gpu: bool, is_read: bool,
) -> None:  # fmt: skip
    scheduler = idle(watch)
    if step:
        watch.evidence.run["step"].read(1, {"cpu": MIB})
    monkeypatch.setattr(watch, "_batches_vary", lambda: vary)
    monkeypatch.setattr(growth_watch.cuda, "initialized", lambda: on_gpu)
    monkeypatch.setattr(growth_watch, "generated_code", lambda: code)
    point = MarkPoint(name, TrainingPosition(step=step), mark(step).readings)
    for _ in range(2):  # the second time it is not due yet: that has taken nearly no time, but some
        watch.at_mark(point)
    assert scheduler.values[0].get(CODE) == (code if is_read else None)


@pytest.mark.parametrize("vary", [False, True, None])
def test_it_is_known_whether_shapes_vary(
    watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch, vary: bool | None
) -> None:
    monkeypatch.setattr(watch, "_batches_vary", lambda: vary)
    watch.evidence.run["step"].read(1, {"cpu": MIB})
    watch.judged()
    assert watch.evidence.situation.shapes_vary is vary


class Clock:
    """A time that only tests let pass; reading the size of generated code takes 10 ms of it."""

    def __init__(self) -> None:
        self.now_s = self.worked_s = 0.0
        self.read_at: list[float] = []

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.worked_s

    def generated_code(self) -> int:
        self.read_at.append(self.now_s)
        self.worked_s += 0.01
        return 4096


def test_generated_code_is_read_as_often_as_its_share_of_the_time_allows(
    watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    idle(watch)
    monkeypatch.setattr(growth_watch, "time", clock)
    monkeypatch.setattr(growth_watch, "generated_code", clock.generated_code)
    policy = ReadingPolicy(first=2, first_share=0.02, later_share=0.005)
    monkeypatch.setattr(growth_watch, "READING", policy)
    while clock.now_s < 6:
        watch.at_mark(MarkPoint("time", TrainingPosition(), []))
        clock.now_s += 0.25
    assert clock.read_at == [0.0, 0.5, 1.0, 3.0, 5.0]


def test_only_marks_at_the_same_place_of_the_loop_are_followed(watch: GrowthWatch) -> None:
    scheduler = idle(watch)
    watch.evidence.run["step"].read(1, {"cpu": MIB})
    for name in ("start", "own", "step", "backward", "time", "end"):
        watch.at_mark(MarkPoint(name, TrainingPosition(), mark(1).readings))
    assert len(scheduler.values) == 3


@pytest.mark.parametrize(("due", "censuses"), [(False, 0), (True, 1)])
def test_a_ledger_that_is_due_has_a_census(watch: GrowthWatch, due: bool, censuses: int) -> None:
    scheduler = idle(watch)
    watch.evidence.run["step"].read(1, {"cpu": MIB})
    ledgers: Any = watch._ledgers
    ledgers.is_due, taken = lambda: due, []
    scheduler.census = taken.append
    watch.at_mark(MarkPoint("step", TrainingPosition(step=3), mark(3).readings))
    assert [position.step for position in taken] == [3] * censuses


@pytest.mark.parametrize(
    ("taken", "outdated", "asked"),
    [(False, False, ["take"]), (True, False, []), (True, True, ["take"])],
)
def test_at_the_end_a_run_without_ledgers_of_it_gets_them(
    watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch, taken: bool, outdated: bool, asked: list[str]
) -> None:
    ledgers: Any = watch._ledgers
    ledgers.taken, ledgers.outdated, ledgers.take = taken, outdated, "take"
    looks: list[tuple[object, object]] = []
    monkeypatch.setattr(
        watch._investigator, "look", lambda also, frames, wanted: looks.append((also, frames))
    )
    watch.take_ledgers([])
    assert looks == [(also, []) for also in asked]
    assert watch.evidence.main.censuses == []


def test_limits_are_those_of_the_last_mark_before_the_end(
    watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        growth_watch, "limits_and_use", lambda *facts: asked.append(facts) or ({"cpu": 9}, {"cpu": 5})
    )
    last, at_end = (reading("cuda:0", nbytes) for nbytes in (7, 0))
    watch.at_mark(last)
    watch.at_mark(MarkPoint("end", TrainingPosition(), at_end.readings))
    watch.judged()
    ((in_use, readings, _),) = asked
    assert in_use is not None and readings == last.readings
    assert watch.limits == watch.evidence.situation.limits == {"cpu": 9}
    assert watch.evidence.situation.used == {"cpu": 5}


# --- the record ---------------------------------------------------------------------------------------------


class Recorded:
    """A watch of the real scheduler, and the lines that it writes; its censuses find nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int | None = None) -> None:
        self.position = TrainingPosition()
        self.lines: list[Any] = []
        self.reported: list[list[Finding]] = []
        self.censuses = censuses.leave_out(monkeypatch)
        self.watch = watch_of(lambda: self.position, self.reported.append, self.lines.append, rank)

    def mark(self, name: str, grown: int = 0, **position: Any) -> None:
        self.position = TrainingPosition(**position)
        self.watch.at_mark(MarkPoint(name, self.position, [Reading("cuda:0", allocated=MIB + grown)]))

    def read(self) -> dict[str, list[float]]:
        """Positions of the readings of the device, by scale."""
        read: dict[str, list[float]] = {}
        for line in self.lines:
            if isinstance(line, Readings) and line.counter == "cuda:0" and line.step is None:
                read.setdefault(line.scale, []).extend(line.at)
        return read


def test_what_grows_is_reported_as_that_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch, rank=3)
    for at in range(1, 41):
        recorded.mark("step", step=at, grown=at * MIB)
    (leak,) = recorded.reported[-1]
    assert (leak.rank, leak.device, leak.bytes_per_step) == (3, "cuda:0", pytest.approx(MIB, rel=0.01))


def test_readings_are_written_on_the_scale_of_their_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    for at in range(1, 21):
        for name in ("backward", "step", "time"):
            recorded.mark(name, step=at, microbatch=2, backwards=2 * at, time_s=at / 2)
    recorded.watch.write_readings(last=True)
    first = range(WARM_UP + 1, ENOUGH_MARKS + 1)  # with so many steps, only these are judged
    assert recorded.read() == {
        "step": [*range(WARM_UP + 1, 21)], "microbatch": [2 * at for at in first],
    }  # fmt: skip
    situation = recorded.lines[-1]
    assert isinstance(situation, Situation) and situation.position.step == 20


def test_a_record_has_all_that_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    for at in range(1, 61):
        recorded.mark("step", step=at)
    judged = recorded.watch.judged()
    recorded.watch.write_readings(last=True)
    kinds = [type(line) for line in recorded.lines]
    assert kinds.count(CensusSeen) == len(recorded.censuses) > 1
    for number, kind in enumerate(kinds):
        assert kind is not CensusSeen or kinds[number - 1] is Situation
    assert judge(Evidence.of(recorded.lines)).judged == judged.judged


def test_time_counts_only_before_there_are_steps_and_without_the_pauses_of_censuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(monkeypatch)
    for at in range(1, 11):
        recorded.mark("time", time_s=at)
    recorded.watch._investigator.paused_s = 5.0
    for at in range(16, 21):
        recorded.mark("time", time_s=at)
    recorded.mark("step", step=1, time_s=21)
    recorded.mark("time", step=1, time_s=22)
    recorded.watch.write_readings(last=True)
    assert recorded.read()["second"][-5:] == pytest.approx(
        [10, 11, 12, 13, 14], abs=0.1
    )  # the last may be of another function
