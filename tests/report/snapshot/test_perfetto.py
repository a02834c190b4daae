"""The trace obeys the Trace Event Format, and tells what the recording tells."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memtriage.model.recording import Annotation, Recording
from memtriage.report.snapshot import perfetto
from memtriage.report.snapshot.perfetto import write_trace
from support.recordings import BEGAN_US, MIB, Tape, recording, stack, training

_REQUIRED = {
    "M": {"name", "pid", "args"},
    "C": {"name", "pid", "ts", "args"},
    "X": {"name", "pid", "tid", "ts", "dur"},
    "i": {"name", "pid", "tid", "ts", "s"},
    "b": {"name", "cat", "id", "pid", "tid", "ts"},
    "e": {"name", "cat", "id", "pid", "tid", "ts"},
}
"""The fields that the format asks of each phase that is used."""


def _trace(made: Recording, folder: Path, name: str = "trace.json") -> list[dict[str, Any]]:
    path = folder / name
    write_trace(made, path)
    raw = path.read_bytes()
    trace = json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"}
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


@pytest.fixture
def leaking() -> Recording:
    first, stacks = training(leak=3 * MIB)
    second, _ = training(device="cuda:1")
    spans = (
        Annotation("Optimizer.step#AdamW.step", 0, BEGAN_US + 20, BEGAN_US + 50),
        Annotation("cut off", 0, BEGAN_US + 70, None),
        Annotation("of the other device", 1, BEGAN_US + 10, BEGAN_US + 30),
    )
    return recording(first, second, stacks=stacks, annotations=spans)


def test_every_event_has_what_the_format_asks_for(leaking: Recording, tmp_path: Path) -> None:
    events = _trace(leaking, tmp_path)
    assert {event["ph"] for event in events} == set(_REQUIRED)
    for event in events:
        assert set(event) >= _REQUIRED[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert isinstance(event.get("ts", 0), int) and event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        assert event.get("s", "p") in {"g", "p", "t"}
        if event["ph"] == "C":
            assert all(type(value) is int for value in event["args"].values())
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name"}
            assert isinstance(event["args"]["name"], str)


def test_every_block_that_begins_ends(leaking: Recording, tmp_path: Path) -> None:
    events = _trace(leaking, tmp_path)
    began = {
        (event["cat"], event["id"], event["name"]): event["ts"] for event in events if event["ph"] == "b"
    }
    ended = {
        (event["cat"], event["id"], event["name"]): event["ts"] for event in events if event["ph"] == "e"
    }
    assert began.keys() == ended.keys()
    assert len(began) == sum(len(device.lives) for device in leaking.devices)
    assert all(began[key] <= ended[key] for key in began)


def test_the_counters_are_those_of_the_replay(leaking: Recording, tmp_path: Path) -> None:
    events = _trace(leaking, tmp_path)
    for process, device in enumerate(leaking.devices, 1):
        for name, course in (
            ("allocated", device.timeline.allocated),
            ("reserved", device.timeline.reserved),
            ("stranded", device.timeline.stranded),
            ("owner: parameter", device.owner_timeline(0)),
        ):
            mine = [
                event
                for event in events
                if event["ph"] == "C" and (event["pid"], event["name"]) == (process, name)
            ]
            values = {event["ts"]: event["args"]["bytes"] for event in mine}
            current = 0
            for number, expected in enumerate(course.tolist()):
                current = values.get(number * 10, current)
                assert current == expected


def test_steps_annotations_and_the_peak_are_where_they_were(leaking: Recording, tmp_path: Path) -> None:
    events = _trace(leaking, tmp_path)
    slices = {
        (event["pid"], event["name"]): (event["ts"], event["dur"]) for event in events if event["ph"] == "X"
    }
    assert slices[1, "Optimizer.step#AdamW.step"] == (20, 30)
    assert slices[2, "of the other device"] == (10, 20)
    assert not any("cut off" in name for _, name in slices)
    ends = leaking.devices[0].steps.ends
    assert slices[1, "step 2"] == (ends[0] * 10, (ends[1] - ends[0]) * 10)
    (peak,) = (event for event in events if (event["ph"], event["pid"]) == ("i", 1))
    assert (peak["ts"], peak["args"]["allocated"]) == (
        leaking.devices[0].peak.event * 10,
        leaking.devices[0].peak.allocated,
    )


def test_an_out_of_memory_error_is_an_instant(tmp_path: Path) -> None:
    stacks = [stack("model.py:20 in forward")]
    tape = Tape(stacks)
    tape.alloc(tape.segment(8 * MIB), MIB, "variable")
    tape.oom(64 * MIB)
    events = _trace(recording(tape.end(), stacks=stacks), tmp_path)
    (error,) = (event for event in events if event["ph"] == "i" and event["name"].startswith("out of memory"))
    assert error["name"] == "out of memory: 64.0 MiB"
    assert error["args"]["site"] == "model.py:20 in forward"
    assert error["args"]["device_free"] is None


def test_counters_of_a_long_recording_keep_their_extremes(
    leaking: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perfetto, "COUNTED_INSTANTS", 24)
    events = _trace(leaking, tmp_path)
    device = leaking.devices[0]
    counted = [
        event for event in events if event["ph"] == "C" and (event["pid"], event["name"]) == (1, "allocated")
    ]
    values = [event["args"]["bytes"] for event in counted]
    assert len(values) < 35 < len(device.events)
    assert (min(values), max(values)) == (device.timeline.allocated.min(), device.timeline.allocated.max())


def test_a_compressed_trace_is_the_same(leaking: Recording, tmp_path: Path) -> None:
    assert _trace(leaking, tmp_path, "trace.json.gz") == _trace(leaking, tmp_path)


def test_a_recording_without_events_is_a_trace_too(leaking: Recording, tmp_path: Path) -> None:
    assert _trace(replace(leaking, devices=()), tmp_path) == []
    tape = Tape([])
    assert {event["ph"] for event in _trace(recording(tape.end(), stacks=[]), tmp_path)} == {"M"}
