"""A comparison, printed."""

from __future__ import annotations

import io
import json

from memtriage.model.comparison import RecordingChange
from memtriage.report.console import console_for
from memtriage.report.snapshot.compare import render, write_json
from memtriage.snapshots.compare import compare
from support.recordings import MIB, recording, training


def _change() -> RecordingChange:
    leaking, stacks = training(leak=3 * MIB)
    fixed, _ = training()
    other, _ = training(device="cuda:1")
    return compare(
        recording(leaking, stacks=stacks, path="before.pickle"),
        recording(fixed, other, stacks=stacks, path="after.pickle"),
    )


def test_what_changed_is_told_in_words() -> None:
    stream = io.StringIO()
    render(_change(), console_for(stream))
    lines = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
    assert "before before.pickle" in lines
    assert "gone leak: 3.0 MiB per step at train.py:12 in log" in lines
    assert "allocated 36.0 MiB -> 24.0 MiB -12.0 MiB" in lines
    assert "variable 12.0 MiB -> 0 B -12.0 MiB" in lines
    assert "train.py:12 in log variable" in lines
    assert "at the snapshot 12.0 MiB -> 0 B -12.0 MiB" in lines
    assert "cuda:1 in the second recording only" in lines
    assert "allocated n/a -> 24.0 MiB" in lines


def test_the_same_recording_twice_has_no_change() -> None:
    device, stacks = training()
    one = recording(device, stacks=stacks)
    stream = io.StringIO()
    render(compare(one, one), console_for(stream))
    assert "nothing changed" in stream.getvalue()
    assert "By owner" not in stream.getvalue()


def test_the_json_has_every_change() -> None:
    stream = io.BytesIO()
    write_json(_change(), stream)
    written = json.loads(stream.getvalue())
    assert written["schema"] == 1
    (first, second) = written["devices"]
    assert first["gone"][0]["kind"] == "leak"
    (site,) = first["sites"]
    assert site["at_end"] == {"before": 12 * MIB, "after": 0}
    assert second["figures"][0]["bytes"]["before"] is None
