"""Snapshots that others recorded: no finding without grounds, and no "clean" where nothing was judged."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from memtriage.model.recording import DeviceRecording
from memtriage.report.snapshot.page import html
from memtriage.snapshots.read import load_snapshot

FOLDER: Final = Path(__file__).parents[1] / "data" / "snapshots" / "public"
REPEATS: Final = {
    "silmont_bf16_128": 12,
    "wedson_medium_128_inference": 24,
    "kkaitlyn_memory_ctx128_forward": 32,
}
"""Layers of recordings of one forward each."""


def recorded(name: str) -> DeviceRecording:
    (device,) = load_snapshot(FOLDER / f"{name}.pickle.gz").devices
    return device


@pytest.mark.parametrize("name", sorted(file.name.partition(".")[0] for file in FOLDER.glob("*.gz")))
def test_only_recorded_steps_are_judged(name: str) -> None:
    device = recorded(name)
    assert not device.findings
    stranded = [note for note in device.notes if "499.9 MiB of a segment of 512.0 MiB" in note]
    assert bool(stranded) == (name == "silmont_mem")
    assert device.verdict == ("clean" if name == "tomi" else "not_judged")
    assert device.steps.count == (17 if name == "tomi" else 0)
    assert device.steps.repeats == REPEATS.get(name, 0)
    assert device.peak.stranded >= 0
    assert not [row.site for row in device.sites if "unwind" in row.site or "??" in row.site]


def test_blocks_name_their_stacks_without_events() -> None:
    for name, site in (
        ("yiyi_oom", "pytorch_backend.py:190 in allocate"),
        ("sketchkv2", "cache_utils_V2.py"),
    ):
        device = recorded(name)
        assert any(site in row.site for row in device.owners)
        assert not [note for note in device.notes if "no call stacks" in note]
        assert "saved for backward" not in {row.owner for row in device.owners}


@pytest.mark.parametrize(("name", "dated"), [("yiyi_oom", False), ("tomi", True)])
def test_a_page_has_a_date_only_if_times_were_recorded(name: str, dated: bool) -> None:
    assert ("recorded until" in html(load_snapshot(FOLDER / f"{name}.pickle.gz"))) == dated
