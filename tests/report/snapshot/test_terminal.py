"""A recording on a terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memtriage.model.recording import Steps
from memtriage.report.snapshot.terminal import render
from memtriage.snapshots.read import load_snapshot
from support.printed import printed
from support.raw_snapshot import Program, recording_of, snapshot_of, user

DATA = Path(__file__).parents[2] / "data" / "snapshots"


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_lines_fit_the_terminal_except_whole_values(width: int) -> None:
    text = printed(render, load_snapshot(DATA / "fragmentation.pickle.gz"), width=width)
    wide = [line for line in text.splitlines() if len(line) > max(width, 60)]
    assert wide == []


def test_plain_ascii_is_enough() -> None:
    text = printed(render, load_snapshot(DATA / "oom.pickle.gz"), encoding="ascii")
    assert "1. out of memory  62.5 MiB" in text


def test_a_recording_without_events_still_tells_what_is_alive() -> None:
    program = Program()
    program.alloc(5 << 20, user(3))
    text = printed(render, recording_of(program.segments()))
    assert "5.0 MiB" in text
    assert "no events were recorded" in text


def test_one_event_is_no_chart() -> None:
    program = Program()
    program.alloc(5 << 20, user(3))
    snapshot = snapshot_of(program)
    (trace,) = snapshot["device_traces"]
    charts = []
    for count in (1, 2):
        snapshot["device_traces"] = [trace[-count:]]
        charts.append("event by event" in printed(render, recording_of(snapshot)))
    assert charts == [False, True]


def test_a_heading_has_the_steps_and_how_they_were_found() -> None:
    program = Program()
    program.alloc(1 << 22, user(3))
    plain = recording_of(snapshot_of(program))
    headings = [line for line in printed(render, plain).splitlines() if line.startswith("cuda:0  ")]
    assert headings == ["cuda:0  2 events · 1 segment"]
    (device,) = plain.devices
    stepped = replace(device, steps=Steps((1,), "period"))
    text = printed(render, replace(plain, devices=(stepped,)))
    assert "cuda:0  2 events · 1 segment · 1 step (by period)" in text
