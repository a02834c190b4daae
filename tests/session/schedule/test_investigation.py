"""Investigations over a real heap: what grew from census to census, who holds it, which line made it."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memtriage.account import retained_sizes
from memtriage.account.census import CensusView
from memtriage.diagnose.growth.history import Holding
from memtriage.diagnose.growth.leaks import CensusPoint
from memtriage.model.census import HolderGroup
from memtriage.model.evidence import CensusSeen
from memtriage.model.paths import in_words
from memtriage.model.position import TrainingPosition
from memtriage.observe.cuda import AllocationHistory
from memtriage.session.schedule.investigation import Investigation, Investigator
from support import censuses

torch = pytest.importorskip("torch")

PROGRAM = """
import numpy
import torch
from collections import deque

class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = [x * 2]
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(1000)

totals = []
weight = torch.nn.Parameter(torch.ones(1000))
losses, seen, texts, recent = [], [], [], deque(maxlen=100)
long = torch.rand(1)
batch = outputs = None
memory = numpy.ones((40, 10_000), numpy.float32)

class Trainer:
    def __init__(self):
        self.kept = []

trainer = Trainer()

def step(number):
    global long, batch, outputs
    loss = (weight * torch.rand(1000)).sum()
    loss.backward()
    losses.append((weight * torch.rand(1000)).exp())
    seen.append(torch.zeros(50_000))
    trainer.kept.append(torch.ones(10_000))
    texts.append(bytes(30_000) + str(number).encode())
    recent.append(torch.zeros(20_000))
    long = torch.cat([long, torch.rand(20_000)])
    batch = torch.rand(100_000 * (1 + number))  # longer this time
    # A new list of new storages at each call, at the same addresses as before.
    outputs = [torch.from_numpy(row) for row in memory[:1 + number]]
    totals.append(Total.apply(weight))
"""
CENSUSES = (3, 5, 7, 9)
LENGTHENED = """

class Table:  # keeps an array where no variable of the program leads to it directly
    def __init__(self):
        self.rows = ((numpy.zeros(0),),)
    def add(self, block):
        self.rows = ((numpy.append(self.rows[0][0], block),),)

predictions = newest_first = numpy.zeros(0)
blocks = []

def lengthen(at):
    global predictions, newest_first, batch, table
    if at != 7.5:  # a pause
        block = numpy.random.rand(5_000) + 1
        count = 3 if at == 3 else 2
        for _ in range(count):
            predictions = numpy.concatenate([predictions, block])
            newest_first = numpy.concatenate([block, newest_first])
            table.add(block)
            blocks.append(numpy.random.rand(20_000))
        batch = numpy.random.rand(int(10_000 * at))  # longer this time, with other content
        zeros = numpy.zeros(int(10_000 * at))
        globals()["mask"] = zeros
"""


class Program:
    """A program, loaded as a module, and what investigates it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file = folder / f"{name}.py"
        self.file.write_text(PROGRAM)
        spec = importlib.util.spec_from_file_location(name, self.file)
        assert spec is not None and spec.loader is not None
        self.module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.said: list[str] = []
        self.investigator = Investigator(str(folder), self.said.append)
        self.investigation = Investigation("step")
        self.looked = 0
        self.steps = 0

    def train(self, until: int) -> None:
        """Steps up to one at which a census is due; allocation sites are recorded before it."""
        while self.steps < until:
            self.investigator.record(until - self.steps)
            self.module.step(self.steps)
            self.steps += 1

    def end(self) -> None:
        """Take all away."""
        self.investigator.stop()
        del sys.modules[self.module.__name__]
        self.module.__dict__.clear()

    def keep(self, kept: Any, made: Callable[[], Any] = lambda: torch.zeros(50_000)) -> None:
        """Two more of something in a container."""
        kept.extend([made(), made()])

    def growing(self, name: str) -> list[Holding]:
        """What grew and has such an end of its name."""
        growing = self.investigation.growing()
        return [each for each in growing if in_words(each.group.anchor).endswith(name)]

    def look(self, view: CensusView) -> None:
        self.looked += 1
        assert view.graph.objects

    def line_of(self, text: str) -> str:
        lines = self.file.read_text().splitlines()
        (number,) = [i for i, line in enumerate(lines, 1) if text in line]
        return f"{self.file.name}:{number} in"


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path, "program")
    yield made
    made.end()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """A program after four censuses, two steps apart."""
    made = Program(tmp_path_factory.mktemp("investigation"), "train")
    for at in CENSUSES:
        made.train(at)
        made.investigator.follow(made.investigation, at, made.look)
    yield made
    made.end()


def by_name(investigation: Investigation, rises: int = 3) -> dict[str, Holding]:
    growing = [each for each in investigation.growing() if len(each.rising()) > rises]
    return {in_words(each.group.anchor): each for each in growing}


def test_nodes_recorded_alone_do_not_replace_the_line_that_allocates(program: Program) -> None:
    for census in (3, 5, 7, 9):
        if census == 9:  # this census was planned only one step before it
            program.investigator.stop()
            while program.steps < census - 1:
                program.module.step(program.steps)
                program.steps += 1
        program.train(census)
        program.investigator.follow(program.investigation, census)
    (kept,) = program.growing("totals[*]")
    site = program.investigation.details[kept.key].allocated_at
    assert site == program.line_of("ctx.kept =") + " forward"


# --- four censuses ------------------------------------------------------------------------------------------


def test_growing_holders_are_known_with_their_sizes(told: Program) -> None:
    growths = by_name(told.investigation)
    assert {"train.losses[*]", "train.seen[*]", "train.trainer.kept[*]", "train.long"} <= growths.keys()
    seen = growths["train.seen[*]"]
    assert [(size.position, size.storages, size.count) for size in seen.sizes] == [
        (at, at * 200_000, at) for at in CENSUSES
    ]
    assert told.investigation.taken == list(CENSUSES)
    losses = growths["train.losses[*]"]
    assert losses.group.attached
    assert losses.sizes[-1].objects > losses.sizes[0].objects  # nodes
    assert losses.sizes[-1].nbytes > losses.sizes[-1].storages
    assert growths["train.long"].lengthens and not seen.lengthens


def test_what_is_made_anew_at_each_step_does_not_grow(told: Program) -> None:
    assert by_name(told.investigation, 1).keys().isdisjoint({"train.batch", "train.outputs[*]"})


def test_each_has_the_line_that_made_it(told: Program) -> None:
    details = {in_words(anchor): detail for (_, anchor), detail in told.investigation.details.items()}
    seen = details["train.seen[*]"]
    assert (seen.holder_kind, seen.entries, seen.retained) == ("list", 9, 9 * 200_000)
    assert seen.allocated_at == told.line_of("seen.append(") + " step"
    assert details["train.losses[*]"].allocated_at == told.line_of("losses.append(") + " step"
    assert details["train.trainer.kept[*]"].allocated_at == told.line_of("kept.append(") + " step"
    assert details["train.recent[*]"].bound == 100


def test_growing_containers_of_data_are_known_with_their_line(told: Program) -> None:
    by_holder = {in_words(data.path): data for data in told.investigation.data.containers.values()}
    texts = by_holder["train.texts[*]"]
    assert (texts.kind, texts.native, texts.entries) == ("list", None, tuple((at, at) for at in CENSUSES))
    assert texts.entry_bytes == pytest.approx(30_000, rel=0.02)
    assert texts.allocated_at == told.line_of("texts.append(") + " step"


def test_data_that_comes_now_and_then_is_followed_over_pauses(program: Program) -> None:
    module, investigation = program.module, program.investigation
    module.runs = {}
    for at, runs in ((3, 1), (13, 2), (23, 3), (30, 3), (43, 5)):
        module.runs.update({run: [bytes(30_000)] for run in range(runs)})
        program.investigator.follow(investigation, at)
    (data,) = (
        each for each in investigation.data.containers.values() if in_words(each.path) == "program.runs[*]"
    )
    assert data.entries == ((3, 1), (13, 2), (23, 3), (43, 5))
    program.investigator.follow(investigation, 80)
    assert "program.runs[*]" not in {in_words(each.path) for each in investigation.data.containers.values()}


def test_arrays_that_are_replaced_by_longer_ones_are_known_with_their_line(program: Program) -> None:
    program.file.write_text(PROGRAM + LENGTHENED)
    module, investigation = program.module, program.investigation
    exec(compile(LENGTHENED, str(program.file), "exec"), module.__dict__)
    module.table = module.Table()
    for at in (3, 5, 7, 7.5):
        module.lengthen(at)
        program.investigator.follow(investigation, at)
    growing = {in_words(data.path): data for data in investigation.data.growing() if data.lengthens}
    assert set(growing) == {"program.predictions", "program.newest_first", "program.table.rows[0][0]"}
    assert growing["program.predictions"].entries == ((3, 120_000), (5, 200_000), (7, 280_000))
    assert (
        growing["program.predictions"].stored_at
        == program.line_of("predictions = numpy.concatenate") + " lengthen"
    )
    assert (
        growing["program.table.rows[0][0]"].stored_at
        == program.line_of("self.rows = ((numpy.append") + " add"
    )


def test_recorders_are_off_after_a_census(told: Program) -> None:
    assert not told.investigator.recording
    assert not tracemalloc.is_tracing()
    assert not torch.is_anomaly_enabled()


def test_it_says_what_takes_time_once(told: Program) -> None:
    assert told.said == ["taking a census"]
    assert told.looked == len(CENSUSES)
    assert not told.investigation.collector_off
    assert [each.position for each in told.investigation.waiting] == list(CENSUSES)


# --- the same object ----------------------------------------------------------------------------------------


def test_a_list_that_is_reached_by_another_path_is_the_same(program: Program) -> None:
    module = program.module
    module.kept = []
    for at in (3, 5, 7):
        if at == 7:
            module.trainer.others = module.kept
            del module.kept
        program.keep(module.trainer.others if at == 7 else module.kept)
        program.investigator.follow(program.investigation, at)
    (holding,) = program.growing("others[*]")
    assert [size.count for size in holding.sizes] == [2, 4, 6]


# --- the end, and memory that runs out ----------------------------------------------------------------------


def test_what_functions_kept_until_the_end_is_still_known(program: Program) -> None:
    def main() -> None:
        local: list[Any] = []
        bounded: deque[Any] = deque(maxlen=100)
        for at in (3, 5):
            program.keep(local)
            program.keep(bounded)
            program.keep(program.module.texts, lambda: bytes(30_000))
            program.investigator.follow(program.investigation, at)

    main()
    program.module.texts = []
    program.investigator.follow(program.investigation, 7, between=False)
    (holding,) = program.growing("local[*]")
    assert [size.position for size in holding.sizes] == [3, 5]
    (holding,) = program.growing("bounded[*]")
    assert program.investigation.details[holding.key].bound == 100
    assert "program.texts[*]" in {
        in_words(data.path) for data in program.investigation.data.containers.values()
    }


def test_in_the_middle_of_a_run_what_a_function_kept_goes_with_it(program: Program) -> None:
    def main() -> None:
        local: list[Any] = []
        for at in (3, 5):
            program.keep(local)
            program.investigator.follow(program.investigation, at)

    main()
    program.investigator.follow(program.investigation, 7)
    assert program.growing("local[*]") == []


def test_out_of_memory_within_a_step_stops_nothing(program: Program) -> None:
    for at in (3, 5):
        program.keep(program.module.seen)
        program.investigator.follow(program.investigation, at)
    program.investigator.follow(program.investigation, 6, frames=())
    (holding,) = program.growing("program.seen[*]")
    assert [each.position for each in holding.rising()] == [3, 5]


def test_a_census_amid_a_failure_reads_nothing_from_devices(told: Program) -> None:
    point = told.investigator.census(9, None, ())
    assert point.interrupted and point.heads == {}
    assert "train.seen[*]" in {in_words(group.anchor) for group in point.census.groups}


def test_too_little_memory_for_a_closer_look_loses_no_growth(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: Any, **options: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(CensusView, "details", no_memory)
    for at in (3, 5):
        program.train(at)
        program.investigator.follow(program.investigation, at, program.look)
    assert program.growing("program.seen[*]")
    assert program.investigation.details == {}
    assert program.looked == 2
    assert "too little host memory for a closer look" in program.said


def test_a_census_that_fails_leaves_no_recorder_on(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: Any) -> None:
        raise MemoryError

    program.train(3)
    monkeypatch.setattr(Investigator, "census", no_memory)
    program.investigator.record(2)
    assert program.investigator.recording
    with pytest.raises(MemoryError):
        program.investigator.follow(program.investigation, 5)
    assert not program.investigator.recording and not tracemalloc.is_tracing()


# --- recorders ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("period", "over"), [(None, 2), (1.0, 2), (4.0, 4), (8.0, 8), (9.0, 2)])
@pytest.mark.parametrize("again", [False, True])
def test_recorders_are_on_over_two_positions_or_a_short_period(
    period: float | None, over: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a recording without a result the CUDA allocator's, which takes nothing from malloc, longer."""
    history = [0]
    monkeypatch.setattr(AllocationHistory, "start", lambda self: history.__setitem__(0, history[0] + 1))
    investigator = Investigator(None, lambda text: None)
    on = []
    for remaining in range(10, 0, -1):
        investigator.record(remaining, period, again=again)
        on.append(investigator.recording)
    assert on == [False] * (10 - over) + [True] * over
    assert history == [8 if again else over]
    investigator.stop()


def test_a_census_that_is_put_off_ends_the_allocators_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllocationHistory, "start", lambda self: setattr(self, "_ours", True))
    stops = []
    monkeypatch.setattr(AllocationHistory, "stop", lambda self: stops.append(setattr(self, "_ours", False)))
    investigator = Investigator(None, lambda text: None)
    for remaining in (9, 8, 7, 20, 19):
        investigator.record(remaining, again=True)
    assert len(stops) == 1


# --- what is noted of each census ---------------------------------------------------------------------------


def test_what_awaits_the_collector_is_known_in_bytes(program: Program) -> None:
    gc.disable()
    try:
        program.investigator.follow(program.investigation, 1)
        cycle: list[Any] = [torch.zeros(50_000)]
        cycle.append(cycle)
        del cycle
        program.investigator.follow(program.investigation, 2)
        assert program.investigation.collector_off
        gc.enable()
        program.investigator.follow(program.investigation, 3)
    finally:
        gc.enable()
    before, after, _ = program.investigation.waiting
    more = after.nbytes.get("cpu", 0) - before.nbytes.get("cpu", 0)
    assert more == pytest.approx(200_000, rel=0.01)  # with the tensor's object
    assert not program.investigation.collector_off


def test_a_profiler_that_is_on_at_every_census_is_known(program: Program) -> None:
    assert not program.investigation.profiled
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        for at in (1, 2):
            program.investigator.follow(program.investigation, at)
        assert program.investigation.profiled
    program.investigator.follow(program.investigation, 2.5, between=False)  # at the end it has stopped
    assert program.investigation.profiled
    program.investigator.follow(program.investigation, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        program.investigator.follow(program.investigation, 4)
    assert not program.investigation.profiled


def test_a_census_is_announced_to_what_it_would_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    investigator = Investigator(None, told.append, lambda: told.append("before"))
    investigator.census(1)
    assert told == ["taking a census", "before"]


def test_what_is_left_out_of_a_census_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = censuses.leave_out(monkeypatch)
    investigation = Investigation("second")
    point = Investigator(None, lambda text: None).follow(investigation, 0.5)
    assert asked == [0.5] and point.census.groups == []
    assert investigation.growing() == [] and not investigation.lacks_sites


def test_retained_size_is_computed_once(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    dominators = retained_sizes.immediate_dominators

    def counted(*arguments: Any) -> Any:
        asked.append(program.steps)
        return dominators(*arguments)

    monkeypatch.setattr(retained_sizes, "immediate_dominators", counted)
    for at in (*CENSUSES, 11, 13):
        program.train(at)
        program.investigator.follow(program.investigation, at, program.look)
    assert asked == [CENSUSES[-1]]
    (seen,) = program.growing("program.seen[*]")
    detail = program.investigation.details[seen.key]
    assert detail.retained == detail.retained_of == 200_000 * CENSUSES[-1]
    assert detail.retained_at == CENSUSES[-1]  # of later censuses it has the sizes, but not this one


@pytest.mark.usefixtures("without_search_limits")
def test_what_a_library_keeps_too_is_found_at_the_next_census(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked: list[bool] = []

    def look(view: CensusView) -> None:
        walked.append(view.graph.all_libraries)

    monkeypatch.setattr(json, "kept_by_a_library", [], raising=False)
    for at in (*CENSUSES, 11):
        program.train(at)
        json.kept_by_a_library[:] = program.module.seen[:1]  # type: ignore[attr-defined]
        program.investigator.follow(program.investigation, at, look)
    (growing,) = program.growing("program.seen[*]")
    detail = program.investigation.details[growing.key]
    # What else holds a tensor of the list is asked for when its growth may be proven.
    assert walked == [False] * len(CENSUSES) + [True]
    assert (detail.elsewhere, detail.retained) == (False, 200_000 * (11 - 1))
    assert [in_words(path) for path in detail.also_held_by] == ["json.kept_by_a_library[*]"]


# --- the record ---------------------------------------------------------------------------------------------


def recorded(
    monkeypatch: pytest.MonkeyPatch, asked: list[tuple[Investigation, int, list[HolderGroup]]]
) -> list[CensusSeen]:
    """The lines of censuses: of each its investigation, its position, and what it finds."""
    lines: list[CensusSeen] = []
    found = iter(asked)

    def taken(self: Investigator, position: float, *unused: object) -> CensusPoint:
        return censuses.point(position, *next(found)[2])

    monkeypatch.setattr(Investigator, "census", taken)
    investigator = Investigator(None, lambda text: None, write=lines.append)
    for investigation, at, _ in asked:
        investigator.follow(investigation, at, training=TrainingPosition(step=at))
    return lines


def test_all_censuses_of_a_run_number_holders_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [censuses.group("kept[*]", at << 20, at, token=1) for at in range(1, 5)]
    steps, seconds = Investigation("step"), Investigation("second")
    lines = recorded(
        monkeypatch,
        [(steps, 1, [kept[0]]), (seconds, 2, [kept[1]]), (steps, 3, [kept[1]]), (steps, 4, [])],
    )
    assert [[(seen.id, seen.nbytes >> 20) for seen in line.holders] for line in lines] == [
        [(1, 1)],
        [(1, 2)],
        [],  # as it was
        [],
    ]
    assert [line.gone for line in lines] == [[], [], [], [1]]
    assert [line.position.step for line in lines] == [1, 2, 3, 4]


def test_censuses_within_a_step_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    other, kept = (censuses.group(name, 1 << 20, token=token) for token, name in ((1, "other"), (2, "kept")))
    run, first, second = Investigation("step"), Investigation("step", step=3), Investigation("step", step=4)
    lines = recorded(
        monkeypatch,
        [(run, 1, [other, kept]), (first, 2, [kept]), (run, 3, [kept]), (second, 4, [kept])],
    )
    assert [line.within_step for line in lines] == [False, True, False, True]
    assert [len(line.holders) for line in lines] == [2, 1, 0, 1]
    assert lines[2].gone == [seen.id for seen in lines[0].holders if in_words(seen.anchor) == "other"]
    assert lines[1].holders == lines[3].holders
