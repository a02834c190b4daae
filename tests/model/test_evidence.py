"""Lines of evidence: positions on each scale, sizes, and what is left out of a line."""

from __future__ import annotations

import msgspec
import pytest

from memtriage.model.evidence import CensusSeen, HolderSeen, Readings
from memtriage.model.position import Scale, TrainingPosition
from support.paths import named

POSITION = TrainingPosition(step=5, microbatch=2, backwards=22, microbatches_per_step=4, time_s=9.0)
STEP_ENDED = msgspec.structs.replace(POSITION, microbatch=4, at_step_end=True)


@pytest.mark.parametrize(
    ("census", "scale", "expected"),
    [
        (CensusSeen(position=POSITION), "step", 5),
        (CensusSeen(position=POSITION, interrupted=True), "step", 6),
        (CensusSeen(position=POSITION), "microbatch", 22),
        (CensusSeen(position=POSITION, interrupted=True), "microbatch", 23),
        (CensusSeen(position=POSITION, within_step=True), "microbatch", 2),
        (CensusSeen(position=POSITION, within_step=True, interrupted=True), "microbatch", 3),
        (CensusSeen(position=STEP_ENDED, within_step=True, interrupted=True), "microbatch", 1),
        (CensusSeen(position=POSITION, work_s=7.5), "second", 7.5),
        (CensusSeen(position=POSITION, work_s=7.5, interrupted=True), "second", 7.5),
    ],
)
def test_a_census_has_a_position_on_each_scale(census: CensusSeen, scale: Scale, expected: float) -> None:
    assert census.at(scale) == expected


@pytest.mark.parametrize(("device", "expected"), [("cpu", 700), ("cuda:0", 500)])
def test_nodes_take_memory_of_the_host(device: str, expected: int) -> None:
    held = HolderSeen(id=1, device=device, anchor=named("a"), path=named("a"), nbytes=500, kept=200)
    assert held.size == expected


def test_what_is_unknown_or_none_takes_no_room_in_a_line() -> None:
    held = HolderSeen(id=1, device="cpu", anchor=named("a"), path=named("a"), nbytes=500)
    assert msgspec.to_builtins(held).keys() == {"id", "device", "anchor", "path", "nbytes"}
    assert msgspec.to_builtins(CensusSeen(position=TrainingPosition())) == {"position": {}}
    line = Readings(scale="step", counter="cpu", at=[1.0], means=[2.0])
    assert msgspec.to_builtins(line) == {"scale": "step", "counter": "cpu", "at": [1.0], "means": [2.0]}


def test_lines_are_read_as_written() -> None:
    held = HolderSeen(id=3, device="cpu", anchor=named("a"), path=named("a"), storages=2, continued=True)
    census = CensusSeen(position=POSITION, holders=[held], gone=[1], waiting={"cpu": {"Node": 9}})
    assert msgspec.json.decode(msgspec.json.encode(census), type=CensusSeen) == census
