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
    known_memory,
    settings_of,
    what_if,
)
from memtriage.model.recording import SEGMENT_ALLOC, SEGMENT_FREE

TORCH = "2.11"
MIB = 1 << 20
DEFAULTS = parse_conf("", TORCH)


def under(conf: str) -> AllocatorSettings:
    return parse_conf(conf, TORCH)


def recorded(name: str) -> Path:
    (path,) = [path for path in H200 if path.name.startswith(name)]
    return path


def test_expandable_segments_leave_less_stranded() -> None:
    trace, segments = read(recorded("fragmentation"))
    now = what_if(trace, segments, DEFAULTS, DEFAULTS).simulator
    then = what_if(trace, segments, DEFAULTS, under("expandable_segments:True")).simulator
    assert then.peak_reserved < now.peak_reserved
    assert then.stranded < now.stranded / 4
    assert then.reserved % (2 * MIB) == 0


def test_expandable_segments_avoid_the_recorded_error() -> None:
    path = recorded("oom")
    trace, segments = read(path)
    change = np.where(trace.kind == SEGMENT_ALLOC, trace.size, 0)
    reserved = np.cumsum(change - np.where(trace.kind == SEGMENT_FREE, trace.size, 0))
    memory = Memory(limit=int(reserved.max()))
    assert not what_if(trace, segments, DEFAULTS, DEFAULTS, memory=memory).fits
    assert what_if(trace, segments, DEFAULTS, under("expandable_segments:True"), memory=memory).fits
    assert what_if(trace, segments, DEFAULTS, DEFAULTS).fits


@pytest.mark.parametrize("limit", [MIB, 1 << 30])  # what was alive at the start needs more than the first
def test_a_replay_ends_where_memory_does(limit: int) -> None:
    trace, segments = read(recorded("fragmentation"))
    ended = what_if(trace, segments, DEFAULTS, DEFAULTS, memory=Memory(capacity=limit))
    assert not ended.fits
    assert ended.simulator.peak_reserved <= limit


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_a_recording_that_starts_late(conf: str) -> None:
    trace, segments = read(recorded("fragmentation"))
    live = sum(block.size for segment in segments for block in segment.blocks if block.state == "active")
    late = what_if(part(trace, len(trace) // 2), segments, DEFAULTS, under(conf))
    assert late.fits
    assert abs(late.simulator.allocated - live) < 8 * MIB  # Slack differs with the place of a block.


def test_with_limited_memory_the_recorded_flushes_do_not_count() -> None:
    trace, segments = read(recorded("fragmentation"))
    free = what_if(trace, segments, DEFAULTS, DEFAULTS).simulator
    limited = what_if(trace, segments, DEFAULTS, DEFAULTS, memory=Memory(limit=1 << 40)).simulator
    assert limited.reserved > free.reserved
    assert limited.allocated == pytest.approx(free.allocated, rel=0.005)


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


def test_allocations_come_from_the_pools_that_the_events_have() -> None:
    tape = Tape([stack("train.py:1 in main")])
    ordinary, private = tape.segment(20 * MIB), tape.segment(20 * MIB, pool=(0, 3))
    tape.alloc(ordinary, 4 * MIB, "variable")
    tape.alloc(private, 4 * MIB, "variable")
    device = tape.end()
    again = what_if(device.events, device.segments, DEFAULTS, DEFAULTS).simulator
    assert (again.reserved, again.allocated) == (40 * MIB, 8 * MIB)
    assert what_if(replace(device.events, pool={}), (), DEFAULTS, DEFAULTS).simulator.reserved == 20 * MIB


@pytest.mark.parametrize(
    ("recorded", "settings"),
    [
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128", "max_split_size": -1},
            parse_conf("max_split_size_mb:128", NEWEST),
        ),
        ({}, AllocatorSettings()),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "of_tomorrow:1", "expandable_segments": True},
            AllocatorSettings(expandable_segments=True),
        ),
    ],
)
def test_the_settings_of_a_recording(recorded: dict[str, object], settings: AllocatorSettings) -> None:
    assert settings_of(recorded) == settings


def test_what_is_set_is_not_tried_again() -> None:
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
    pressed = [simulator for simulator, fits in outcomes if fits and simulator.retries]
    assert pressed
    assert {simulator.allocated for simulator in pressed} == {live}
