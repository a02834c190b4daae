"""The chart's layers are the recording, instant by instant."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memtriage.model.recording import OWNERS, DeviceRecording
from memtriage.report.snapshot.timeline import timeline
from support.page_data import unpack
from support.recordings import BEGAN_US, MIB, Tape, stack, training


def _drawn(device: DeviceRecording, values: int = 100_000) -> dict[str, Any]:
    drawn = timeline(device, values)
    assert drawn is not None
    return drawn


@st.composite
def devices(draw: st.DrawFn) -> DeviceRecording:
    """Segments, blocks and frees in any order."""
    tape = Tape([stack("a.py:1 in f")])
    segments = [tape.segment(64 * MIB), tape.segment(2 * MIB)]
    alive: list[int] = []
    for action in draw(st.lists(st.sampled_from(["segment", "alloc", "free", "await", "step"]), max_size=30)):
        if action == "segment":
            segments.append(tape.segment(draw(st.sampled_from([2, 20])) * MIB))
        elif action == "alloc":
            owner = draw(st.sampled_from(OWNERS))
            alive.append(tape.alloc(segments[0], draw(st.integers(1, 4)) * 512, owner))
        elif action == "step":
            tape.step()
        elif alive:
            tape.free(alive.pop(draw(st.integers(0, len(alive) - 1))), complete=action == "free")
    return tape.end()


@given(devices())
def test_layers_sum_to_what_is_reserved(device: DeviceRecording) -> None:
    drawn = _drawn(device)
    layers = [unpack(layer["values"]) for layer in drawn["layers"]]
    assert [sum(column) for column in zip(*layers, strict=True)] == device.timeline.reserved.tolist()
    lines = {line["name"]: unpack(line["values"]) for line in drawn["lines"]}
    assert lines["allocated"] == device.timeline.allocated.tolist()
    assert lines["reserved"] == device.timeline.reserved.tolist()


def test_long_course_keeps_peak_errors_and_extremes() -> None:
    random = np.random.default_rng(5)
    tape = Tape([stack("a.py:1 in f")])
    segment = tape.segment(64 * MIB)
    for number in range(400):
        life = tape.alloc(segment, int(random.integers(1, 100)) * 512, OWNERS[number % 3])
        if number % 5:
            tape.free(life)
        if number == 200:
            tape.oom(MIB)
    device = tape.end()
    drawn = _drawn(device, 1)
    rows = unpack(drawn["event"])
    assert len(rows) < 200 < len(device.events)
    assert device.peak.event == rows[drawn["peak_row"]]
    assert device.ooms[0].event in rows
    for layer in drawn["layers"][:3]:
        whole = device.owner_timeline(OWNERS.index(layer["name"]))
        shown = unpack(layer["values"])
        assert (min(shown), max(shown)) == (whole.min(), whole.max())


def test_what_no_block_accounts_for_is_a_layer_of_its_own() -> None:
    device, _ = training()
    course = replace(
        device.timeline, allocated=device.timeline.allocated + MIB, active=device.timeline.active + MIB
    )
    drawn = _drawn(replace(device, timeline=course))
    (unknown,) = (layer for layer in drawn["layers"] if layer["name"] == "not attributed")
    assert set(unpack(unknown["values"])) == {MIB}


def test_the_chart_says_from_when_on_it_is_exact() -> None:
    device, _ = training()
    drawn = _drawn(replace(device, exact_from_us=BEGAN_US + 45))
    (mark,) = (mark for mark in drawn["marks"] if mark["label"] == "exact from here")
    assert mark["at"]["event"] == 5


def test_less_than_two_events_draw_nothing() -> None:
    assert timeline(Tape([]).end(), 1000) is None
    tape = Tape([stack("a.py:1 in f")])
    tape.segment(20 * MIB)
    assert timeline(tape.end(), 1000) is None


def test_a_long_course_takes_about_the_characters_that_it_may() -> None:
    random = np.random.default_rng(5)
    tape = Tape([stack("a.py:1 in f")])
    segment = tape.segment(64 * MIB)
    for _ in range(400):
        tape.free(tape.alloc(segment, int(random.integers(1, 100)) * 512, OWNERS[0]))
    device = tape.end()
    drawn = {characters: _drawn(device, characters) for characters in (6_000, 10_000_000)}

    def size(columns: dict[str, Any]) -> int:
        packed = [columns["event"], columns["time_us"]]
        packed += [column["values"] for column in (*columns["layers"], *columns["lines"])]
        return sum(len(column["base64"]) for column in packed)

    assert 3_000 < size(drawn[6_000]) <= 6_000
    shown = len(unpack(drawn[6_000]["event"]))
    assert drawn[6_000]["left_out"].startswith(f"{shown:,} of {len(device.events):,} instants")
    assert len(unpack(drawn[10_000_000]["event"])) == len(device.events)
    assert drawn[10_000_000]["left_out"] is None


def test_what_is_nowhere_is_no_layer_and_marks_say_where_they_are() -> None:
    device, _ = training()
    drawn = _drawn(device)
    names = [layer["name"] for layer in drawn["layers"]]
    assert len(names) == len(set(names)) and "private and free" not in names
    assert [layer["name"] for layer in drawn["layers"] if layer["hatched"]] in ([], ["stranded"])
    peak = next(mark for mark in drawn["marks"] if mark["label"] == "peak")
    times = device.events.time_us
    assert peak["at"]["time"] == (int(times[device.peak.event]) - int(times[0])) / 1e6
    assert (peak["strong"], peak["color"]) == (True, "ink")
    steps = [mark for mark in drawn["marks"] if mark["label"].startswith("step")]
    assert [mark["at"]["event"] for mark in steps] == [
        min(end, len(device.events) - 1) for end in device.steps.ends
    ]
    assert {(mark["strong"], mark["color"]) for mark in steps} == {(False, None)}


def test_errors_are_marked_first_and_at_most_eight() -> None:
    tape = Tape([stack("a.py:1 in f")])
    segment = tape.segment(64 * MIB)
    for _ in range(10):
        tape.alloc(segment, 512, OWNERS[0])
        tape.oom(MIB)
    labels = [mark["label"] for mark in _drawn(tape.end())["marks"]]
    assert labels[:9] == ["out of memory"] * 8 + ["peak"] and "out of memory" not in labels[9:]
