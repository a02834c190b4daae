"""From the censuses around a cell to what it changed."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.cells import by_device, changes, holders
from memtriage.model.census import Census, HolderGroup
from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind
from support.paths import named

MIB = 1 << 20
Held = Mapping[str, tuple[int, int]]
"""Holder to its storages and bytes."""


def census(held: Held) -> Census:
    groups = [
        HolderGroup(
            device="cpu", anchor=path(holder), path=path(holder), count=count, nbytes=nbytes,
            by_path={path(holder): nbytes},
            owners={"variable": nbytes}, attached=False,
        )
        for holder, (count, nbytes) in held.items()
    ]  # fmt: skip
    return Census(storages=[], groups=groups, objects=0, nodes=0, seconds=0.0)


def path(holder: str) -> HolderPath:
    """`Out` is a notebook's shown values."""
    return (PathSegment(SegmentKind.OUTPUT), ANY_ITEM) if holder == "Out[*]" else named(holder)


def test_changes_by_holder() -> None:
    came, went = changes(
        census({"kept[*]": (1, MIB), "old": (3, 2 * MIB), "same": (1, MIB)}),
        census({"kept[*]": (3, 3 * MIB), "new": (1, 4 * MIB), "same": (1, MIB + 8)}),
    )
    assert [(change.holder, change.bytes, change.count) for change in came] == [
        ("new", 4 * MIB, 1),
        ("kept[*]", 2 * MIB, 2),
    ]
    assert [(change.holder, change.bytes, change.count) for change in went] == [("old", -2 * MIB, -3)]


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 5), st.integers(4096, 1 << 40))),
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 5), st.integers(4096, 1 << 40))),
)
def test_changes_sum_to_the_difference(before: Held, after: Held) -> None:
    came, went = changes(census(before), census(after))
    difference = sum(n for _, n in after.values()) - sum(n for _, n in before.values())
    told = sum(change.bytes for change in (*came, *went))
    assert abs(told - difference) < 4 * 1024  # what is less than 1 KiB is left out
    assert all(change.bytes > 0 for change in came)
    assert all(change.bytes < 0 for change in went)


def test_holders_and_totals() -> None:
    held = census({"a": (1, MIB), "kib": (1, 1024), "small": (1, 1023)})
    assert [holder.holder for holder in holders(held)] == ["a", "kib"]
    assert [change.holder for change in changes(census({}), held)[0]] == ["a", "kib"]
    assert [change.holder for change in changes(held, census({}))[1]] == ["a", "kib"]
    assert by_device(held) == {"cpu": MIB + 2047}
