"""The simulator against recordings: the same segments in the same order, the same place for every block."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.allocator.recordings import H200, UNDER_SETTINGS, columns, part, read, simulated

from memtriage.allocator.driver import Driver
from memtriage.allocator.events import AllocatorEvent
from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator
from memtriage.model.recording import ALLOC, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE
from support.fidelity import compare

TORCH = "2.11"
H200_MEMORY = 150_109_159_424
"""139.80 GiB, as the error of the recorded out-of-memory process has it."""
OOM_FRACTION = 0.012
"""To which that process was limited."""

SETTINGS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:[2:1,8:4,>:8]",
    "large_segment_size_mb:48",
    "expandable_segments:True,large_segment_size_mb:64",
]


@pytest.mark.parametrize("path", H200, ids=lambda path: path.stem)
def test_a_recording_from_a_gpu_comes_out_to_the_byte(path: Path) -> None:
    trace, segments = read(path)
    comparison = compare(trace, segments, parse_conf("", TORCH))
    assert comparison.difference is None
    steps = np.where(trace.kind == SEGMENT_ALLOC, trace.size, 0)
    steps -= np.where(trace.kind == SEGMENT_FREE, trace.size, 0)
    assert comparison.peak_reserved == steps.cumsum().max()


def test_a_limit_of_the_process_explains_the_error_by_itself() -> None:
    (path,) = [path for path in H200 if path.name.startswith("oom")]
    trace, segments = read(path)
    settings = parse_conf(f"per_process_memory_fraction:{OOM_FRACTION}", TORCH)
    assert compare(trace, segments, settings, device_memory=H200_MEMORY).difference is None
    wider = parse_conf("per_process_memory_fraction:0.013", TORCH)
    comparison = compare(trace, segments, wider, device_memory=H200_MEMORY)
    assert "recorded oom" in (comparison.difference or "")


@pytest.mark.parametrize("path", H200, ids=lambda path: path.stem)
def test_a_recording_that_starts_late_too(path: Path) -> None:
    trace, segments = read(path)
    certain = 0
    for first in range(0, len(trace), max(1, len(trace) // 9)):
        comparison = compare(part(trace, first), segments, parse_conf("", TORCH))
        assert comparison.difference is None or comparison.guessed
        certain += not comparison.guessed
    assert certain > 0


def test_one_that_starts_between_a_free_and_its_completion() -> None:
    settings = parse_conf("expandable_segments:True", TORCH)
    trace, segments, _ = simulated(settings, seed=3, streams=(0, 7))
    completed = np.flatnonzero((trace.kind == FREE_COMPLETED) & (trace.size > 4 << 20))
    assert len(completed) > 10
    for first in completed[:: len(completed) // 10].tolist():
        assert compare(part(trace, first), segments, settings).difference is None


def test_one_that_starts_with_a_hole_in_an_expandable_segment() -> None:
    events: list[AllocatorEvent] = []
    settings = parse_conf("expandable_segments:True", TORCH)
    one = Simulator(settings, hook=events.append)
    _, hole, behind = (one.malloc(size << 20) for size in (30, 60, 30))
    one.free(hole)
    one.empty_cache()
    begun = len(events)
    one.free(behind)
    one.malloc(25 << 20)
    one.malloc(5 << 20)
    assert compare(part(columns(events), begun), list(one.snapshot()), settings).difference is None


@pytest.mark.parametrize("conf", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_recordings_under_other_settings(conf: str, seed: int) -> None:
    settings = parse_conf(conf, TORCH)
    trace, segments, _ = simulated(settings, seed=seed, streams=(0, 7, 0x5F0), flush_every=400)
    assert compare(trace, segments, settings).difference is None
    cut = compare(part(trace, len(trace) // 2), segments, settings)
    assert cut.difference is None or cut.guessed


@pytest.mark.parametrize(
    ("conf", "share", "options"),
    [
        *((conf, 0.9, {"streams": (0, 7)}) for conf in SETTINGS),
        *((conf, 0.95, {"flush_every": 5}) for conf in SETTINGS[:2]),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_recordings_under_pressure(conf: str, share: float, options: dict[str, Any], seed: int) -> None:
    _, _, unlimited = simulated(parse_conf("", TORCH), seed=seed, streams=options.get("streams", (0,)))
    memory = unlimited.peak_allocated
    settings = parse_conf(f"{conf},per_process_memory_fraction:{share}".lstrip(","), TORCH)
    trace, segments, simulator = simulated(settings, seed=seed, memory=memory, **options)
    assert simulator.retries > 0
    assert simulator.ooms > 0 or "flush_every" in options
    assert compare(trace, segments, settings, device_memory=memory).difference is None


@pytest.mark.parametrize("seed", range(3))
def test_recordings_with_garbage_collection(seed: int) -> None:
    _, _, unlimited = simulated(parse_conf("", TORCH), seed=seed)
    conf = "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9"
    settings = parse_conf(conf, TORCH)
    memory = unlimited.peak_allocated * 3 // 2
    trace, segments, simulator = simulated(settings, seed=seed, memory=memory)
    assert (trace.kind == SEGMENT_FREE).any()
    assert simulator.retries == 0
    assert compare(trace, segments, settings, device_memory=memory).difference is None


@pytest.mark.parametrize("path", UNDER_SETTINGS, ids=lambda path: path.stem)
def test_a_recording_under_other_settings_from_a_gpu(path: Path) -> None:
    trace, segments = read(path)
    made_with = json.loads(path.with_name(path.name.replace(".pickle.gz", ".json")).read_text())
    settings = parse_conf(made_with["conf"], made_with["torch"])
    comparison = compare(trace, segments, settings, device_memory=made_with["device_memory"])
    assert comparison.difference is None
    if settings.expandable_segments:
        assert compare(trace, segments, parse_conf("", made_with["torch"])).difference is not None


def test_a_released_private_pool_gives_its_segments_back() -> None:
    events: list[AllocatorEvent] = []
    settings = parse_conf("", TORCH)
    one = Simulator(settings, hook=events.append)
    one.free(one.malloc(30 << 20, pool=(0, 1)))
    one.malloc(30 << 20, pool=(0, 2))
    one.malloc(30 << 20)
    one.empty_cache()
    one.release_pool((0, 1))
    one.empty_cache()
    one.malloc(5 << 20)
    assert compare(columns(events), list(one.snapshot()), settings).difference is None
    kept = [event for event in events if event.action != "segment_free"]
    assert compare(columns(kept), list(one.snapshot()), settings).difference is not None


def test_private_pools_are_told_by_the_events_or_by_the_segments() -> None:
    settings = parse_conf("", TORCH)
    trace, segments, _ = simulated(settings, seed=2, pools=((0, 0), (0, 1), (3, 0)))
    assert compare(trace, segments, settings).difference is None
    assert compare(replace(trace, pool={}), segments, settings).difference is None


def test_an_address_may_change_from_default_to_private_pool() -> None:
    class OneAddressForOneSize(Driver):
        def place(self, size: int) -> int:
            return 1 << 40 if size == 30 << 20 else super().place(size)

    events: list[AllocatorEvent] = []
    settings = parse_conf("", TORCH)
    one = Simulator(settings, driver=OneAddressForOneSize(), hook=events.append)
    for pool in ((0, 0), (0, 1)):
        one.free(one.malloc(30 << 20, pool=pool))
        one.free(one.malloc(50 << 20))
        one.empty_cache()
    trace = replace(columns(events), pool={})
    assert (trace.kind == SEGMENT_ALLOC).sum() == 4
    assert (trace.kind == SEGMENT_FREE).sum() == 3
    assert compare(trace, list(one.snapshot()), settings).difference is None


@pytest.mark.parametrize(("recorded", "assumed"), list(pairwise(SETTINGS)))
def test_wrong_settings_do_not_explain_a_recording(recorded: str, assumed: str) -> None:
    trace, segments, _ = simulated(parse_conf(recorded, TORCH), seed=1)
    assert compare(trace, segments, parse_conf(assumed, TORCH)).difference is not None


def test_nor_does_the_wrong_version() -> None:
    settings = parse_conf("", "2.13")
    trace, segments, _ = simulated(settings, seed=1)
    assert compare(trace, segments, settings).difference is None
    comparison = compare(trace, segments, parse_conf("", "2.11"))
    assert comparison.difference is not None


class TestDamage:
    """A recording with one thing changed does not pass."""

    trace, segments = read(next(path for path in H200 if path.name.startswith("frag")))
    settings = parse_conf("", TORCH)

    def difference(self, **columns: np.ndarray) -> str:
        comparison = compare(replace(self.trace, **columns), self.segments, self.settings)
        assert comparison.difference is not None
        return comparison.difference

    def test_a_segment_of_another_size(self) -> None:
        size = self.trace.size.copy()
        index = int(np.flatnonzero(self.trace.kind == SEGMENT_ALLOC)[10])
        size[index] += 2 << 20
        assert f"recorded segment_alloc of {size[index]} bytes" in self.difference(size=size)

    def test_a_block_in_another_place(self) -> None:
        address = self.trace.address.copy()
        index = int(np.flatnonzero(self.trace.kind == ALLOC)[-1])
        address[index] += 512
        assert f"(event {index})" in self.difference(address=address)

    def test_a_segment_that_comes_too_late(self) -> None:
        index = int(np.flatnonzero(self.trace.kind == SEGMENT_ALLOC)[30])
        order = np.arange(len(self.trace))
        order[index], order[index + 1] = index + 1, index
        names = ("kind", "address", "size", "stream")
        swapped = {name: getattr(self.trace, name)[order] for name in names}
        assert f"up to event {index} simulated 31 segment events, recorded 30" in self.difference(**swapped)

    def test_a_segment_that_is_missing_at_the_end(self) -> None:
        comparison = compare(part(self.trace, 0), self.segments[:-1], self.settings)
        assert comparison.difference is not None
