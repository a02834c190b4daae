"""What changed between two recordings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.model.comparison import DeviceChange, ValueChange
from memtriage.model.findings import Finding
from memtriage.model.recording import DeviceRecording, SiteRow
from memtriage.snapshots.compare import compare
from support.recordings import MIB, Tape, recording, stack, training


def _compared(before: DeviceRecording, after: DeviceRecording) -> DeviceChange:
    (change,) = compare(recording(before, stacks=[]), recording(after, stacks=[])).devices
    return change


def _device(*held: tuple[str, int], findings: Sequence[Finding] = ()) -> DeviceRecording:
    """A device on which each site holds so much."""
    tape = Tape([stack(site) for site, _ in held], findings=findings)
    for number, (_, amount) in enumerate(held):
        tape.alloc(tape.segment(amount), amount, "variable", stack=number)
    return tape.end()


def test_a_site_that_holds_more_is_told_with_both_amounts() -> None:
    change = _compared(
        _device(("a.py:1 in f", MIB), ("b.py:2 in g", MIB)),
        _device(("a.py:1 in f", 4 * MIB), ("b.py:2 in g", MIB)),
    )
    (site,) = change.sites
    assert (site.site, site.was, site.at_end) == ("a.py:1 in f", None, ValueChange(before=MIB, after=4 * MIB))
    assert site.at_end.by == 3 * MIB
    (owner,) = change.owners
    assert (owner.owner, owner.at_end) == ("variable", ValueChange(before=2 * MIB, after=5 * MIB))


def test_the_biggest_change_comes_first() -> None:
    change = _compared(
        _device(("a.py:1 in f", 9 * MIB), ("b.py:1 in f", MIB), ("c.py:1 in f", 3 * MIB)),
        _device(("a.py:1 in f", 8 * MIB), ("b.py:1 in f", 6 * MIB)),
    )
    assert [site.site for site in change.sites] == ["b.py:1 in f", "c.py:1 in f", "a.py:1 in f"]


def test_a_line_that_moved_is_the_same_site() -> None:
    change = _compared(_device(("a.py:10 in f", MIB)), _device(("a.py:14 in f", 2 * MIB)))
    (site,) = change.sites
    assert (site.site, site.was) == ("a.py:14 in f", "a.py:10 in f")
    assert site.at_end == ValueChange(before=MIB, after=2 * MIB)


def test_a_line_that_moved_and_holds_the_same_is_no_change() -> None:
    assert _compared(_device(("a.py:10 in f", MIB)), _device(("a.py:14 in f", MIB))).sites == []


def test_of_several_lines_of_a_function_none_is_guessed() -> None:
    change = _compared(
        _device(("a.py:10 in f", MIB), ("a.py:11 in f", 2 * MIB)), _device(("a.py:20 in f", MIB))
    )
    assert {(site.site, site.at_end.before, site.at_end.after) for site in change.sites} == {
        ("a.py:10 in f", MIB, 0),
        ("a.py:11 in f", 2 * MIB, 0),
        ("a.py:20 in f", 0, MIB),
    }


def test_findings_are_matched_even_when_their_line_moved() -> None:
    leak = Finding(kind="leak", device="cuda:0", allocated_at="a.py:10 in f")
    moved = Finding(kind="leak", device="cuda:0", allocated_at="a.py:12 in f")
    residue = Finding(kind="residue", device="cuda:0", allocated_at="b.py:1 in g")
    other = Finding(kind="fragmentation", device="cuda:0")
    change = _compared(
        _device(("a.py:10 in f", MIB), findings=[leak, residue]),
        _device(("a.py:12 in f", MIB), findings=[moved, other]),
    )
    assert (change.gone, change.new, change.same) == ([residue], [other], [moved])


def test_device_of_one_recording_is_unknown_in_the_other() -> None:
    device, stacks = training()
    change = compare(recording(stacks=stacks), recording(device, stacks=stacks)).devices[0]
    assert (change.in_before, change.in_after) == (False, True)
    allocated = {figure.name: figure.bytes for figure in change.figures}["allocated"]
    assert allocated == ValueChange(before=None, after=24 * MIB)
    assert allocated.by is None
    assert all(site.at_peak.before is None for site in change.sites)


def test_growth_is_unknown_without_steps_zero_without_site() -> None:
    before = _with_growth(_device(("a.py:1 in f", MIB)), 5 * MIB, steps=4)
    after = _with_growth(_device(("b.py:1 in f", MIB)), None, steps=0)
    sites = {site.site: site.per_step for site in _compared(before, after).sites}
    assert sites == {
        "a.py:1 in f": ValueChange(before=5 * MIB, after=None),
        "b.py:1 in f": ValueChange(before=0, after=None),
    }


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3)), unique=True, max_size=6))
def test_no_site_is_lost_or_counted_twice(sites: list[tuple[str, int]]) -> None:
    held = [(f"{name}.py:{line} in f", (number + 1) * 512) for number, (name, line) in enumerate(sites)]
    moved = [(f"{name}.py:{line + 2} in f", (number + 1) * 1024) for number, (name, line) in enumerate(sites)]
    change = _compared(_device(*held), _device(*moved))
    difference = sum(amount for _, amount in moved) - sum(amount for _, amount in held)
    assert sum(site.at_end.by or 0 for site in change.sites) == difference


def _with_growth(device: DeviceRecording, per_step: int | None, *, steps: int) -> DeviceRecording:
    rows: list[SiteRow] = [replace(row, per_step=per_step) for row in device.sites]
    return replace(device, sites=tuple(rows), steps=replace(device.steps, ends=tuple(range(1, steps + 1))))


@pytest.mark.parametrize("leak", [0, MIB])
def test_a_recording_does_not_differ_from_itself(leak: int) -> None:
    device, _ = training(leak=leak)
    change = _compared(device, device)
    assert (change.sites, change.owners, change.gone, change.new) == ([], [], [], [])
    assert len(change.same) == (1 if leak else 0)
