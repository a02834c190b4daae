"""What a watch takes for itself must not look like growth of the program."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memtriage.diagnose.growth.counter import CODE
from memtriage.diagnose.growth.evidence import WARM_UP
from memtriage.model.evidence import CensusSeen, Readings
from memtriage.model.findings import Finding
from memtriage.model.position import TrainingPosition
from memtriage.observe.counters import CounterReader, Reading
from memtriage.observe.malloc import malloc_info
from memtriage.session import growth_watch
from memtriage.session.growth_watch import GrowthWatch, ReadingPolicy
from memtriage.session.marks import MarkPoint
from memtriage.session.schedule.investigation import Investigator

MIB = 1024**2
pytestmark = pytest.mark.skipif(malloc_info() is None, reason="no counter of malloc")


class WorkingScheduler:
    """Keeps memory, as censuses do, and switches a recorder on at every other mark and off at the next.

    What is in `garbage` is released at each mark, as if Python's collector ran then.
    """

    def __init__(self, investigator: Investigator, *unused: object) -> None:
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


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrowthWatch]:
    monkeypatch.setattr(growth_watch, "CensusScheduler", WorkingScheduler)
    monkeypatch.setattr(growth_watch, "READING", ReadingPolicy(work_s=0.0))
    unused: Any = SimpleNamespace(before_census=None, take=None, is_due=lambda: False)
    made = GrowthWatch(
        CounterReader(),
        cast(Any, SimpleNamespace(works=True, now=TrainingPosition)),
        unused,
        script_root=None,
        say=lambda text: None,
        report=lambda leaks: None,
        write=lambda line: None,
        rank=None,
        batches_vary=lambda: False,
    )
    made.install()
    gc.collect()  # what earlier tests left must not be freed between two marks
    yield made
    made.remove()


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
    scheduler: Any = watch.scheduler
    scheduler.works = False
    for step in range(1, 6):
        scheduler.garbage.append(bytearray(8 * MIB))
        watch.at_mark(mark(step))
    read = [values["cpu"] for values in scheduler.values]
    assert max(read) - min(read) < MIB


def reading(device: str, allocated: int | None) -> MarkPoint:
    return MarkPoint("own", TrainingPosition(step=1), [Reading(device, allocated=allocated)])


def test_a_counter_that_was_read_once_can_be_read(
    watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Mapping[str, bool]] = []
    monkeypatch.setattr(
        growth_watch, "judge_devices", lambda schedule, readable: asked.append(dict(readable))
    )
    watch.scheduler.judged_on = None  # type: ignore[misc]
    for device, allocated in (("cuda:0", None), ("cuda:0", 5), ("cuda:0", None), ("cuda:1", None)):
        watch.at_mark(reading(device, allocated))
    watch.judged()
    assert asked == [{"cuda:0": True, "cuda:1": False}]


@pytest.mark.parametrize(
    ("name", "step", "is_read"), [("step", 1, True), ("backward", 0, True), ("backward", 1, False)]
)
def test_generated_code_is_read_where_shapes_vary_but_not_within_steps(
    watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch, name: str, step: int, is_read: bool
) -> None:
    scheduler: Any = watch.scheduler
    scheduler.works, scheduler.main = False, SimpleNamespace(scale="second")
    monkeypatch.setattr(growth_watch, "generated_code", lambda: 4096)
    point = MarkPoint(name, TrainingPosition(step=step), mark(step).readings)
    for _ in range(2):  # the second time it is not due yet: that has taken nearly no time, but some
        watch.at_mark(point)
    assert scheduler.values[0].get(CODE) == (4096 if is_read else None)


@pytest.mark.parametrize(("vary", "is_read"), [(False, False), (True, True), (None, True)])
def test_generated_code_is_not_read_where_all_batches_have_one_size(
    watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch, vary: bool | None, is_read: bool
) -> None:
    scheduler: Any = watch.scheduler
    scheduler.works, scheduler.main = False, SimpleNamespace(scale="step")
    monkeypatch.setattr(watch, "_batches_vary", lambda: vary)
    monkeypatch.setattr(growth_watch, "generated_code", lambda: 4096)
    watch.at_mark(MarkPoint("step", TrainingPosition(step=1), mark(1).readings))
    assert (CODE in scheduler.values[0]) == is_read


@pytest.mark.parametrize(
    ("vary", "generates", "may_fill"),
    [(False, True, False), (True, False, True), (None, True, True), (None, False, False)],
)
def test_native_caches_may_fill_where_shapes_vary_or_new_code_comes(
    watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch, vary: bool | None, generates: bool, may_fill: bool
) -> None:
    evidences = []
    scheduler: Any = watch.scheduler
    investigation = SimpleNamespace(collector_off=False, profiled=False)
    scheduler.main = SimpleNamespace(
        scale="step", counters={}, investigation=investigation, generates_code=lambda: generates
    )
    monkeypatch.setattr(watch, "_batches_vary", lambda: vary)
    monkeypatch.setattr(watch, "_progress", SimpleNamespace(works=True, now=TrainingPosition))
    monkeypatch.setattr(
        growth_watch, "find_leaks", lambda scheduler, evidence: evidences.append(evidence) or []
    )
    assert watch.leaks() == []
    assert [evidence.caches_may_fill for evidence in evidences] == [may_fill]


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
    scheduler: Any = watch.scheduler
    scheduler.works, scheduler.main = False, SimpleNamespace(scale="second")
    monkeypatch.setattr(growth_watch, "time", clock)
    monkeypatch.setattr(growth_watch, "generated_code", clock.generated_code)
    policy = ReadingPolicy(first=2, first_share=0.02, later_share=0.005)
    monkeypatch.setattr(growth_watch, "READING", policy)
    while clock.now_s < 6:
        watch.at_mark(MarkPoint("time", TrainingPosition(), []))
        clock.now_s += 0.25
    assert clock.read_at == [0.0, 0.5, 1.0, 3.0, 5.0]


@pytest.mark.parametrize(("code", "on_gpu"), [(None, False), (4096, True)])
def test_generated_code_is_left_out_where_it_says_nothing(
    watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch, code: int | None, on_gpu: bool
) -> None:
    scheduler: Any = watch.scheduler
    scheduler.works, scheduler.main = False, SimpleNamespace(scale="second")
    monkeypatch.setattr(growth_watch.cuda, "initialized", lambda: on_gpu)
    monkeypatch.setattr(growth_watch, "generated_code", lambda: code)
    watch.at_mark(MarkPoint("step", TrainingPosition(step=1), mark(1).readings))
    assert CODE not in scheduler.values[0]


def test_only_marks_at_the_same_place_of_the_loop_are_followed(watch: GrowthWatch) -> None:
    scheduler: Any = watch.scheduler
    scheduler.works, scheduler.main = False, SimpleNamespace(scale="step")
    for name in ("start", "own", "step", "backward", "time", "end"):
        watch.at_mark(MarkPoint(name, TrainingPosition(), mark(1).readings))
    assert len(scheduler.values) == 3


@pytest.mark.parametrize(("due", "censuses"), [(False, 0), (True, 1)])
def test_a_ledger_that_is_due_has_a_census(watch: GrowthWatch, due: bool, censuses: int) -> None:
    scheduler: Any = watch.scheduler
    scheduler.works, scheduler.main = False, SimpleNamespace(scale="step")
    ledgers: Any = watch._ledgers
    ledgers.is_due, taken = lambda: due, []
    scheduler.census = taken.append
    watch.at_mark(MarkPoint("step", TrainingPosition(step=3), mark(3).readings))
    assert [position.step for position in taken] == [3] * censuses


@pytest.mark.parametrize(
    ("taken", "outdated", "judged", "others"),
    [(False, False, 1, 0), (True, False, 0, 0), (True, True, 0, 1)],
)
def test_at_the_end_a_run_without_ledgers_of_it_gets_them(
    watch: GrowthWatch,
    monkeypatch: pytest.MonkeyPatch,
    taken: bool,
    outdated: bool,
    judged: int,
    others: int,
) -> None:
    scheduler: Any = watch.scheduler
    ledgers: Any = watch._ledgers
    ledgers.taken, ledgers.outdated, scheduler.census = taken, outdated, (positions := []).append
    frames: list[object] = []
    monkeypatch.setattr(watch._investigator, "census", lambda step, also, given, wanted: frames.append(given))
    position = TrainingPosition(step=5)
    monkeypatch.setattr(
        watch, "_progress", SimpleNamespace(works=True, now=TrainingPosition, position=position)
    )
    watch.take_ledgers([])
    assert (len(positions), frames) == (judged, [[]] * others)


def test_limits_are_those_of_the_last_mark_before_the_end(
    watch: GrowthWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[object, ...]] = []
    scheduler: Any = watch.scheduler
    investigation = SimpleNamespace(collector_off=True, profiled=False)
    scheduler.main = SimpleNamespace(scale="step", counters={}, investigation=investigation)
    finding = Finding(kind="leak", device="cpu")
    monkeypatch.setattr(watch, "_progress", SimpleNamespace(works=True, now=TrainingPosition))
    monkeypatch.setattr(watch, "_rank", 3)
    monkeypatch.setattr(
        growth_watch, "limits_and_use", lambda *facts: seen.append(facts) or ({"cpu": 9}, {"cpu": 5})
    )
    monkeypatch.setattr(
        growth_watch, "find_leaks", lambda scheduler, evidence: seen.append(evidence) or [finding]
    )
    last, at_end = (reading("cuda:0", nbytes) for nbytes in (7, 0))
    watch.at_mark(last)
    watch.at_mark(MarkPoint("end", TrainingPosition(), at_end.readings))
    assert [leak.rank for leak in watch.leaks()] == [3]
    (in_use, readings, _), evidence = seen
    assert in_use is not None and readings == last.readings
    assert (evidence.limits, evidence.used, evidence.collector_off) == ({"cpu": 9}, {"cpu": 5}, True)
    assert watch.limits == {"cpu": 9}


# --- the record ---------------------------------------------------------------------------------------------


def lines_of(watch: GrowthWatch, marks: Iterable[MarkPoint]) -> list[Any]:
    """What a watch writes of some marks."""
    written: list[Any] = []
    unused: Any = SimpleNamespace(works=True, now=lambda: TrainingPosition(step=9))
    watch._write, watch._progress = written.append, unused
    scheduler: Any = watch.scheduler
    scheduler.works, scheduler.main = False, SimpleNamespace(scale="step")
    for each in marks:
        watch.at_mark(each)
    watch.write_evidence()
    return written


def test_readings_are_written_on_the_scale_of_their_marks(watch: GrowthWatch) -> None:
    marks = [
        MarkPoint(
            name,
            TrainingPosition(step=at, microbatch=2, backwards=2 * at, time_s=at / 2),
            [Reading("cpu", allocated=MIB)],
        )
        for at in range(1, 21)
        for name in ("backward", "step", "time")
    ]
    *lines, situation = lines_of(watch, marks)
    after_warm_up = range(WARM_UP + 1, 21)
    assert {(line.scale, tuple(line.at)) for line in lines if line.counter == "cpu"} == {
        ("step", tuple(after_warm_up)),
        ("microbatch", tuple(2 * at for at in after_warm_up)),
    }
    assert situation.position.step == 9


def test_time_counts_only_before_there_are_steps_and_without_the_pauses_of_censuses(
    watch: GrowthWatch,
) -> None:
    def at(time_s: float) -> MarkPoint:
        return MarkPoint("time", TrainingPosition(time_s=time_s), [Reading("cpu", allocated=MIB)])

    def marks() -> Iterator[MarkPoint]:
        yield from map(at, range(1, 11))
        watch._write_census(CensusSeen(position=TrainingPosition(time_s=10), pause_s=5.0))
        yield from map(at, range(16, 21))

    lines = lines_of(watch, marks())
    read = [line.at for line in lines if isinstance(line, Readings) and line.counter == "cpu"]
    assert [at for block in read for at in block] == [*range(WARM_UP + 1, 11), *range(11, 16)]
    assert [line.work_s for line in lines if isinstance(line, CensusSeen)] == [10]
