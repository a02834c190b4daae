"""A recording under other settings, and how much memory there was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.allocator.recordings import H200, part, read, simulated
from tests.support.recordings import Tape, stack, training

from memtriage.allocator.blocks import ALLOCATED
from memtriage.allocator.settings import NEWEST, AllocatorSettings, parse_conf
from memtriage.allocator.what_if import (
    UNLIMITED,
    Memory,
    alternatives,
    columns_of,
    known_memory,
    scenarios,
    settings_of,
    what_if,
)
from memtriage.model.recording import ALLOC, SEGMENT_ALLOC, SEGMENT_FREE
from memtriage.snapshots.read import load_snapshot

TORCH = "2.11"
MIB = 1 << 20
DEFAULTS = parse_conf("", TORCH)


def under(conf: str) -> AllocatorSettings:
    return parse_conf(conf, TORCH)


def recorded(name: str) -> Path:
    (path,) = [path for path in H200 if path.name.startswith(name)]
    return path


def reserved_after(path: Path) -> np.ndarray:
    trace, _ = read(path)
    change = np.where(trace.kind == SEGMENT_ALLOC, trace.size, 0)
    return np.cumsum(change - np.where(trace.kind == SEGMENT_FREE, trace.size, 0))


@pytest.mark.parametrize(
    "path", [path for path in H200 if "oom" not in path.name], ids=lambda path: path.stem
)
def test_under_its_own_settings_a_recording_comes_out_as_it_was(path: Path) -> None:
    trace, segments = read(path)
    scenario = what_if(trace, segments, DEFAULTS, DEFAULTS)
    reserved = reserved_after(path)
    assert (scenario.peak_reserved, scenario.end_reserved) == (reserved.max(), reserved[-1])
    live = [block.size for segment in segments for block in segment.blocks if block.state == "active"]
    # Ties between blocks of equal size go by address, and with the place of a block goes its slack.
    assert scenario.end_allocated == pytest.approx(sum(live), rel=0.005)
    assert scenario.end_reserved == scenario.end_allocated + scenario.end_stranded + scenario.end_releasable
    assert (scenario.fits, scenario.retries, scenario.recorded_ooms) == (True, 0, 0)


def test_expandable_segments_leave_less_stranded() -> None:
    trace, segments = read(recorded("fragmentation"))
    now = what_if(trace, segments, DEFAULTS, DEFAULTS)
    then = what_if(trace, segments, DEFAULTS, under("expandable_segments:True"))
    assert then.peak_reserved < now.peak_reserved
    assert then.end_stranded < now.end_stranded / 4
    assert then.end_reserved % (2 * MIB) == 0


def test_emptying_the_cache_at_the_end() -> None:
    trace, segments = read(recorded("healthy"))
    now = what_if(trace, segments, DEFAULTS, DEFAULTS)
    emptied = what_if(trace, segments, DEFAULTS, DEFAULTS, empty_cache_at_end=True)
    assert now.end_releasable > 0
    assert emptied.end_releasable == 0
    assert emptied.end_reserved == now.end_reserved - now.end_releasable


def test_expandable_segments_avoid_the_recorded_error() -> None:
    path = recorded("oom")
    trace, segments = read(path)
    memory = Memory(limit=int(reserved_after(path).max()))
    again = what_if(trace, segments, DEFAULTS, DEFAULTS, memory=memory)
    assert (again.fits, again.recorded_ooms, again.met_ooms) == (False, 1, 1)
    avoided = what_if(trace, segments, DEFAULTS, under("expandable_segments:True"), memory=memory)
    assert (avoided.fits, avoided.recorded_ooms, avoided.met_ooms) == (True, 1, 0)
    ample = what_if(trace, segments, DEFAULTS, DEFAULTS)
    assert ample.fits


def test_a_replay_ends_where_memory_does() -> None:
    trace, segments = read(recorded("fragmentation"))
    scenario = what_if(trace, segments, DEFAULTS, DEFAULTS, memory=Memory(capacity=1 << 30))
    assert scenario.failed_at is not None
    assert trace.kind[scenario.failed_at] == ALLOC
    assert not scenario.fits
    assert scenario.peak_reserved <= 1 << 30
    nothing = what_if(
        part(trace, 2000), segments, DEFAULTS, under("max_split_size_mb:64"), memory=Memory(limit=MIB)
    )
    assert nothing.failed_at == -1


def test_a_recording_that_starts_late() -> None:
    trace, segments = read(recorded("fragmentation"))
    late = part(trace, len(trace) // 2)
    end = what_if(trace, segments, DEFAULTS, DEFAULTS).end_allocated
    for conf in ("", "expandable_segments:True"):
        scenario = what_if(late, segments, DEFAULTS, under(conf))
        assert scenario.fits
        assert abs(scenario.end_allocated - end) < 8 * MIB  # Slack differs with the place of a block.


def test_under_its_own_settings_it_begins_with_what_was_there() -> None:
    path = recorded("fragmentation")
    trace, segments = read(path)
    first = len(trace) // 2
    scenario = what_if(part(trace, first), segments, DEFAULTS, DEFAULTS)
    reserved = reserved_after(path)
    assert scenario.peak_reserved == reserved[first - 1 :].max()
    assert reserved[first - 1] > trace.size[first:].max()


def test_with_limited_memory_the_recorded_flushes_do_not_count() -> None:
    trace, segments = read(recorded("fragmentation"))
    free = what_if(trace, segments, DEFAULTS, DEFAULTS)
    limited = what_if(trace, segments, DEFAULTS, DEFAULTS, memory=Memory(limit=1 << 40))
    assert limited.end_reserved > free.end_reserved
    assert limited.end_allocated == pytest.approx(free.end_allocated, rel=0.005)


class TestMemory:
    """How much the recorded process had."""

    def tape(self, device_free: int | None) -> Tape:
        tape = Tape([stack("train.py:1 in main")])
        segment = tape.segment(64 * MIB)
        tape.alloc(segment, 48 * MIB, "variable")
        tape.oom(40 * MIB, device_free=device_free)
        return tape

    def test_unknown_without_an_error(self) -> None:
        device, _ = training()
        assert known_memory(device) == UNLIMITED

    def test_what_the_driver_had_left(self) -> None:
        assert known_memory(self.tape(10 * MIB).end()) == Memory(capacity=74 * MIB)

    @pytest.mark.parametrize("device_free", [None, 90 * MIB])
    def test_a_limit_that_is_not_recorded(self, device_free: int | None) -> None:
        assert known_memory(self.tape(device_free).end()) == Memory(limit=64 * MIB)


def test_the_columns_of_a_replayed_recording_keep_its_pools() -> None:
    tape = Tape([stack("train.py:1 in main")])
    ordinary, private = tape.segment(20 * MIB), tape.segment(20 * MIB, pool=(0, 3))
    tape.alloc(ordinary, 4 * MIB, "variable")
    tape.alloc(private, 4 * MIB, "variable")
    device = tape.end()
    columns = columns_of(device)
    (born,) = columns.pool
    assert columns.pool == {born: (0, 3)}
    assert columns.address[born] == device.lives.address[1]
    scenario = what_if(columns, device.segments, DEFAULTS, DEFAULTS)
    assert (scenario.end_reserved, scenario.end_allocated) == (40 * MIB, 8 * MIB)
    without = what_if(replace(columns, pool={}), (), DEFAULTS, DEFAULTS)
    assert without.end_reserved == 20 * MIB


class TestScenarios:
    """What `memtriage snapshot` asks for."""

    def test_a_fragmented_recording(self) -> None:
        recording = load_snapshot(recorded("fragmentation"))
        (device,) = recording.devices
        found = {scenario.name: scenario.outcome for scenario in scenarios(device, recording.settings)}
        *settings, primed = found
        assert settings == [
            "as recorded",
            "empty_cache() at the end",
            "expandable_segments:True",
            "max_split_size_mb:128",
            "max_split_size_mb:512",
        ]
        assert primed.startswith("primed: 6 blocks, 8.")
        assert found[primed].peak_reserved < 0.9 * found["as recorded"].peak_reserved
        assert found["as recorded"].peak_reserved == device.timeline.reserved.max()
        assert found["expandable_segments:True"].end_stranded < found["as recorded"].end_stranded
        assert all(outcome.fits for outcome in found.values())

    def test_one_that_ran_out_of_memory(self) -> None:
        recording = load_snapshot(recorded("oom"))
        (device,) = recording.devices
        assert known_memory(device) == Memory(limit=device.end.reserved)
        found = {scenario.name: scenario.outcome.fits for scenario in scenarios(device, recording.settings)}
        assert not found["as recorded"]
        assert found["expandable_segments:True"]

    def test_the_settings_of_a_recording(self) -> None:
        text = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128", "max_split_size": -1}
        assert settings_of(text) == parse_conf("max_split_size_mb:128", NEWEST)
        assert settings_of({}) == AllocatorSettings()
        unknown = {"PYTORCH_CUDA_ALLOC_CONF": "of_tomorrow:1", "expandable_segments": True}
        assert settings_of(unknown) == AllocatorSettings(expandable_segments=True)

    def test_what_is_set_is_not_tried_again(self) -> None:
        assert list(alternatives(settings_of({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}))) == [
            "max_split_size_mb:128",
            "max_split_size_mb:512",
        ]


@pytest.mark.parametrize("seed", range(4))
def test_a_flush_under_pressure_frees_no_block_that_lives(seed: int) -> None:
    recorded_settings = parse_conf("", TORCH)
    trace, segments, program = simulated(recorded_settings, seed=seed, streams=(0, 7, 9))
    settings = under("expandable_segments:True")
    live = sum(settings.round_size(block.requested) for block in program.blocks() if block.state == ALLOCATED)
    outcomes = [
        what_if(trace, segments, recorded_settings, settings, memory=Memory(limit=limit))
        for limit in range(program.peak_allocated, 2 * program.peak_allocated, 20 * MIB)
    ]
    pressed = [outcome for outcome in outcomes if outcome.fits and outcome.retries]
    assert pressed
    assert {outcome.end_allocated for outcome in pressed} == {live}
