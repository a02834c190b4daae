"""A step cut out of a trace: what it allocates and frees, and what it does to blocks of earlier steps."""

from __future__ import annotations

from dataclasses import replace

from memtriage.prediction.lifetimes import (
    FREE,
    AllocationTrace,
    LifetimeEvent,
    Marker,
    StreamUse,
    TracedBlock,
)
from memtriage.prediction.many_steps.step_trace import Other, StepTrace, cut

FREES = Other("free", block=(1, ("forward", "mul", 0)))
STEP = StepTrace(
    operations=[100, 50, Other("malloc", 20, 7), -1, 30, FREES],
    left={("forward", "add", 0): 1},
    names=["mul", "add", "copy", "sub"],
)


def test_other_sizes_make_a_step_of_the_same_structure() -> None:
    other = STEP.with_sizes([1, 2, 3, 4])
    assert other.operations == [1, 2, Other("malloc", 3, 7), -1, 4, FREES]
    assert other.sizes() == [1, 2, 3, 4]
    assert other.structure() == STEP.structure() and other.differs(STEP)
    assert not STEP.with_sizes(STEP.sizes()).differs(STEP)


def test_steps_of_another_structure_cannot_be_derived() -> None:
    made = Other("malloc", 20, 7)
    for other in (
        replace(STEP, operations=[100, 50, made, -2, 30, FREES]),
        replace(STEP, operations=[100, 50, Other("malloc", 20, 8), -1, 30, FREES]),
        replace(STEP, operations=[100, 50, made, -1, 30, Other("free", block=(2, ("forward", "mul", 0)))]),
        replace(STEP, left={("forward", "add", 0): 3}),
    ):
        assert other.differs(STEP) and other.structure() != STEP.structure()


def test_a_step_that_comes_again_leaves_what_was_made_before_training() -> None:
    def free(age: int) -> Other:
        return Other("free", block=(age, ("build", "empty", 0)))

    step = StepTrace([10, free(3), -1, free(2), Other("empty")], names=["mul"])
    settled = step.settled(2)  # the third step: what is three steps old was there before the first
    assert settled.operations == [10, -1, free(2), Other("empty")]
    assert step.settled(3).operations == step.operations


# --- out of a trace -----------------------------------------------------------------------------------------


class Taped:
    """A trace that is written event by event."""

    def __init__(self) -> None:
        self.trace = AllocationTrace()
        self.begin("build", -1)

    def begin(self, phase: str, step: int) -> None:
        self.phase, self.step = phase, step
        self.trace.markers.append(Marker(event=len(self.trace.events), phase=phase, step=step))

    def make(self, size: int, op: str, stream: int = 0) -> int:
        number = len(self.trace.blocks)
        self.trace.blocks.append(TracedBlock(size, op, self.phase, False, stream=stream))
        self.trace.events.append(LifetimeEvent(number, size))
        return number

    def free(self, number: int) -> None:
        self.trace.events.append(LifetimeEvent(number, FREE))

    def use(self, stream: int, number: int | None) -> None:
        self.trace.uses.append(StreamUse(len(self.trace.events), stream, number))

    def empty(self) -> None:
        self.trace.releases.append(len(self.trace.events))


def test_a_trace_is_cut_into_its_building_and_its_steps() -> None:
    tape = Taped()
    weight = tape.make(1000, "empty")
    tape.make(8, "empty")
    tape.begin("forward", 0)
    first = tape.make(100, "mul")
    tape.make(20, "mul")
    tape.free(first)
    loss = tape.make(4, "sum")
    tape.begin("forward", 1)
    tape.free(loss)
    tape.free(weight)
    again = tape.make(100, "mul", stream=7)
    tape.free(again)
    build, zeroth, step = cut(tape.trace, 2)
    assert (build.operations, build.names) == ([1000, 8], ["empty", "empty"])
    assert build.left == {("build", "empty", 0): 0, ("build", "empty", 1): 1}
    assert zeroth.operations == [100, 20, -1, 4]
    assert zeroth.left == {("forward", "mul", 0): 1, ("forward", "sum", 0): 2}
    assert step.operations == [
        Other("free", block=(1, ("forward", "sum", 0))),
        Other("free", block=(2, ("build", "empty", 0))),
        Other("malloc", 100, 7),
        -1,
    ]
    assert step.left == {} and step.oldest == 2


def test_other_streams_and_emptied_caches_come_before_the_next_event() -> None:
    tape = Taped()
    kept = tape.make(8, "empty")
    tape.begin("forward", 0)
    own = tape.make(100, "mul")
    tape.use(7, own)
    tape.use(7, kept)
    tape.empty()
    tape.make(20, "add")
    tape.use(7, None)
    tape.free(own)
    _, step = cut(tape.trace, 1)
    assert step.operations == [
        100,
        Other("empty"),
        Other("use", stream=7, block=0),
        Other("use", stream=7, block=(1, ("build", "empty", 0))),
        20,
        Other("passed", stream=7),
        -1,
    ]
    assert step.left == {("forward", "add", 0): 1}
