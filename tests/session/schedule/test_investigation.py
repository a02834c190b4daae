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
from memtriage.diagnose.growth.attribution import Rise, attribute
from memtriage.diagnose.growth.evidence import Evidence, Sighting
from memtriage.model.census import GroupDetail
from memtriage.model.evidence import CensusSeen, DataSeen, HolderSeen
from memtriage.model.paths import in_words
from memtriage.model.position import TrainingPosition
from memtriage.observe.cuda import AllocationHistory
from memtriage.session.schedule.investigation import Following, Investigator

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
    if at != 8:  # a pause
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
        self.evidence = Evidence()
        self.lines: list[CensusSeen] = []
        self.investigator = Investigator(str(folder), self.said.append, observed=self.observed)
        self.following = Following()
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

    def observed(self, line: CensusSeen) -> None:
        self.lines.append(line)
        self.evidence.add(line)

    def census(self, at: int, **more: Any) -> None:
        """A census after so many steps."""
        self.investigator.follow(self.following, TrainingPosition(step=at), self.look, **more)

    def growing(self, name: str) -> list[Rise]:
        """What grew up to the last census and has such an end of its name."""
        rises = attribute(self.evidence.run["step"])
        return [rise for rise in rises if in_words(last(rise).anchor).endswith(name)]

    def holders(self) -> dict[str, list[Sighting]]:
        """All holders, at each census."""
        series = self.evidence.run["step"].series()
        return {
            in_words(sightings[-1].seen.anchor): sightings
            for sightings in series
            if isinstance(sightings[-1].seen, HolderSeen)
        }

    def detail(self, name: str) -> GroupDetail:
        """What the closer look at a holder found."""
        detail = self.holders()[name][-1].seen.detail
        assert detail is not None
        return detail

    def data(self) -> dict[str, list[Sighting]]:
        """Containers of ordinary data that grew, at each census."""
        series = self.evidence.run["step"].series()
        return {
            in_words(sightings[-1].seen.path): sightings
            for sightings in series
            if isinstance(sightings[-1].seen, DataSeen)
        }

    def look(self, view: CensusView) -> None:
        self.looked += 1
        assert view.graph.objects

    def line_of(self, text: str) -> str:
        lines = self.file.read_text().splitlines()
        (number,) = [i for i, line in enumerate(lines, 1) if text in line]
        return f"{self.file.name}:{number} in"


def last(rise: Rise) -> HolderSeen:
    if isinstance(rise.seen, HolderSeen):
        return rise.seen
    return HolderSeen(id=0, device="host", anchor=rise.seen.path, path=rise.seen.path)


def positions(rise: Rise) -> list[float]:
    return [at for at, _ in rise.points]


def entries(series: list[Sighting]) -> list[tuple[float, int]]:
    return [(each.at, each.seen.entries) for each in series]


@pytest.fixture
def program(only_new_objects: None, tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path, "program")
    yield made
    made.end()


@pytest.fixture(scope="module")
def told(only_new_objects: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """A program after four censuses, two steps apart."""
    made = Program(tmp_path_factory.mktemp("investigation"), "train")
    for at in CENSUSES:
        made.train(at)
        made.census(at)
    yield made
    made.end()


def test_nodes_recorded_alone_do_not_replace_the_line_that_allocates(program: Program) -> None:
    for census in (3, 5, 7, 9):
        if census == 9:  # this census was planned only one step before it
            program.investigator.stop()
            while program.steps < census - 1:
                program.module.step(program.steps)
                program.steps += 1
        program.train(census)
        program.census(census)
    assert program.detail("program.totals[*]").allocated_at == program.line_of("ctx.kept =") + " forward"


# --- four censuses ------------------------------------------------------------------------------------------


def test_growing_holders_are_known_with_their_sizes(told: Program) -> None:
    series = told.holders()
    assert [(each.at, each.seen.nbytes, each.seen.storages) for each in series["train.seen[*]"]] == [
        (at, at * 200_000, at) for at in CENSUSES
    ]
    losses = [each.seen for each in series["train.losses[*]"]]
    assert losses[-1].attached and losses[-1].size > losses[-1].nbytes
    assert losses[-1].nodes > losses[0].nodes
    assert [each.seen.continued for each in series["train.long"]] == [False, True, True, True]
    for name in ("losses[*]", "seen[*]", "trainer.kept[*]", "train.long"):
        (rise,) = told.growing(name)
        assert positions(rise) == list(CENSUSES)


def test_each_has_the_line_that_made_it(told: Program) -> None:
    seen = told.detail("train.seen[*]")
    assert (seen.holder_kind, seen.entries) == ("list", CENSUSES[-1])
    assert seen.retained == seen.retained_of == 200_000 * CENSUSES[-1]
    assert seen.allocated_at == told.line_of("seen.append(") + " step"
    assert told.detail("train.losses[*]").allocated_at == told.line_of("losses.append(") + " step"
    assert told.detail("train.trainer.kept[*]").allocated_at == told.line_of("kept.append(") + " step"
    assert told.detail("train.recent[*]").bound == 100


def test_growing_containers_of_data_are_known_with_their_line(told: Program) -> None:
    texts = told.data()["train.texts[*]"]
    assert entries(texts) == [(at, at) for at in CENSUSES]
    latest = texts[-1].seen
    assert (latest.kind, latest.native) == ("list", None)
    assert latest.entry_bytes == pytest.approx(30_000, rel=0.02)
    assert latest.allocated_at == told.line_of("texts.append(") + " step"


def test_arrays_that_are_replaced_by_longer_ones_are_known_with_their_line(program: Program) -> None:
    program.file.write_text(PROGRAM + LENGTHENED)
    module = program.module
    exec(compile(LENGTHENED, str(program.file), "exec"), module.__dict__)
    module.table = module.Table()
    for at in (3, 5, 7, 8):
        module.lengthen(at)
        program.census(at)
    found = {name: each for name, each in program.data().items() if each[-1].seen.lengthens}
    assert set(found) == {"program.predictions", "program.newest_first", "program.table.rows[0][0]"}
    predictions, rows = found["program.predictions"], found["program.table.rows[0][0]"]
    assert entries(predictions) == [(3, 120_000), (5, 200_000), (7, 280_000), (8, 280_000)]
    line = program.line_of("predictions = numpy.concatenate") + " lengthen"
    assert [each.seen.stored_at for each in predictions[1:]] == [line] * 3
    assert rows[-1].seen.stored_at == program.line_of("self.rows = ((numpy.append") + " add"


def test_recorders_are_off_after_a_census(told: Program) -> None:
    assert not told.investigator.sites.recording
    assert not tracemalloc.is_tracing()
    assert not torch.is_anomaly_enabled()


def test_it_says_what_takes_time_once(told: Program) -> None:
    assert told.said == ["taking a census"]
    assert told.looked == len(CENSUSES)
    assert [(line.position.step, line.collector_off) for line in told.lines] == [
        (at, False) for at in CENSUSES
    ]


# --- the end, and memory that runs out ----------------------------------------------------------------------


def test_what_functions_kept_until_the_end_is_still_known(program: Program) -> None:
    def main() -> None:
        local: list[Any] = []
        bounded: deque[Any] = deque(maxlen=100)
        for at in (3, 5):
            program.keep(local)
            program.keep(bounded)
            program.keep(program.module.texts, lambda: bytes(30_000))
            program.census(at)

    main()
    program.module.texts = []
    program.census(7, between=False)
    (rise,) = program.growing("local[*]")
    assert positions(rise) == [3, 5]
    (rise,) = program.growing("bounded[*]")
    detail = last(rise).detail
    assert detail is not None and detail.bound == 100
    assert program.growing("program.texts[*]")


def test_out_of_memory_within_a_step_stops_nothing(program: Program) -> None:
    for at in (3, 5):
        program.keep(program.module.seen)
        program.census(at)
    program.census(5, frames=())  # in the sixth step
    (rise,) = program.growing("program.seen[*]")
    assert positions(rise) == [3, 5]


def test_a_census_amid_a_failure_reads_nothing_from_devices(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bool] = []
    monkeypatch.setattr(CensusView, "heads", lambda view, last=False: read.append(last) or {})
    program.keep(program.module.seen)
    program.census(9, frames=())
    (line,) = program.lines
    assert (line.interrupted, line.between, read) == (True, False, [])
    assert "program.seen[*]" in {in_words(seen.anchor) for seen in line.holders}
    program.census(10)
    assert read == [False, True]


def test_too_little_memory_for_a_closer_look_loses_no_growth(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: Any, **options: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(CensusView, "details", no_memory)
    for at in (3, 5):
        program.train(at)
        program.census(at)
    assert program.growing("program.seen[*]")
    assert program.holders()["program.seen[*]"][-1].seen.detail is None
    assert program.looked == 2
    assert "too little host memory for a closer look" in program.said


def test_a_census_that_fails_leaves_no_recorder_on(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: Any) -> None:
        raise MemoryError

    program.train(3)
    monkeypatch.setattr(Investigator, "look", no_memory)
    program.investigator.record(2)
    assert program.investigator.sites.recording
    with pytest.raises(MemoryError):
        program.census(5)
    assert not program.investigator.sites.recording and not tracemalloc.is_tracing()


# --- recorders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("period", "over"), [(0, 2), (1.0, 2), (4.0, 4), (8.0, 8), (9.0, 2)])
@pytest.mark.parametrize("again", [False, True])
def test_recorders_are_on_over_two_positions_or_a_short_period(
    period: float, over: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a recording without a result the CUDA allocator's, which takes nothing from malloc, longer."""
    history = [0]
    monkeypatch.setattr(AllocationHistory, "start", lambda self: history.__setitem__(0, history[0] + 1))
    investigator = Investigator(None, lambda text: None)
    on = []
    for remaining in range(10, 0, -1):
        investigator.record(remaining, period, again=again)
        on.append(investigator.sites.recording)
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


def test_what_awaits_the_collector_is_known_by_class_in_bytes(program: Program) -> None:
    class Node:
        kept: Any

    gc.disable()
    try:
        program.census(1)
        cycle = Node()
        cycle.kept = [torch.zeros(50_000), cycle]
        del cycle
        program.census(2)
    finally:
        gc.enable()
    program.census(3)
    before, after, _ = (sum(line.waiting.get("cpu", {}).values()) for line in program.lines)
    assert after - before == pytest.approx(200_000, rel=0.01)  # with the tensor's object
    assert "Node" in program.lines[1].waiting["cpu"]
    assert [line.collector_off for line in program.lines] == [True, True, False]


def test_a_profiler_that_is_on_at_a_census_is_known(program: Program) -> None:
    program.census(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        program.census(2)
    program.census(3)
    assert [line.profiled for line in program.lines] == [False, True, False]


def test_a_census_is_announced_to_what_it_would_disturb() -> None:
    said: list[str] = []
    investigator = Investigator(None, said.append, lambda: said.append("before"))
    investigator.look(lambda view: said.append("looked"))
    assert said == ["taking a census", "before", "looked"]


def test_retained_size_is_computed_once(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    dominators = retained_sizes.immediate_dominators

    def counted(*arguments: Any) -> Any:
        asked.append(program.steps)
        return dominators(*arguments)

    monkeypatch.setattr(retained_sizes, "immediate_dominators", counted)
    for at in CENSUSES[:3]:
        program.train(at)
        program.census(at)
    assert asked == [CENSUSES[1]]
    detail = program.detail("program.seen[*]")
    assert detail.retained == detail.retained_of == 200_000 * CENSUSES[2]  # its list kept all, and still does
    bound = next(cut for cut in detail.cuts if cut.cut == "bound")
    assert bound.releases == bound.of >= 200_000 * CENSUSES[2]


def test_what_a_library_keeps_too_is_found_at_the_next_census(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked: list[bool] = []

    look = program.look
    monkeypatch.setattr(program, "look", lambda view: walked.append(view.graph.all_libraries) or look(view))
    monkeypatch.setattr(json, "kept_by_a_library", [], raising=False)
    for at in CENSUSES:
        program.train(at)
        json.kept_by_a_library[:] = program.module.seen[:1]  # type: ignore[attr-defined]
        program.census(at)
    detail = program.detail("program.seen[*]")
    # What else holds a tensor of the list is asked for once it is known to grow.
    assert walked == [False, False, True, False]
    assert (detail.elsewhere, detail.retained) == (False, 200_000 * (CENSUSES[2] - 1))
    assert [in_words(path) for path in detail.also_held_by] == ["json.kept_by_a_library[*]"]


# --- the record ---------------------------------------------------------------------------------------------


def test_censuses_within_a_step_have_numbers_and_changes_of_their_own(program: Program) -> None:
    run, within = program.following, Following(within_step=True)
    for following, at in ((run, 1), (run, 2), (within, 2), (run, 3)):
        program.investigator.follow(following, TrainingPosition(step=at))
    assert [line.within_step for line in program.lines] == [False, False, True, False]
    first, _, of_step, last_line = program.lines
    assert (last_line.holders, last_line.gone) == ([], [])  # nothing has changed
    assert len(first.holders) > 1
    assert [(seen.id, seen.anchor) for seen in of_step.holders] == [
        (seen.id, seen.anchor) for seen in first.holders
    ]
