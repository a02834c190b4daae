"""From the censuses around a cell's executions to what grows."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.cells import CellRun, by_device, changes, growing, holders, run_finding
from memtriage.diagnose.growth.leaks import CensusPoint
from memtriage.model.census import Census, GroupDetail, HolderGroup
from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind, in_words
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
    return Census(storages=[], groups=groups, nodes_by_anchor={}, objects=0, nodes=0, seconds=0.0)


def path(holder: str) -> HolderPath:
    """`Out` is a notebook's shown values."""
    return (PathSegment(SegmentKind.OUTPUT), ANY_ITEM) if holder == "Out[*]" else named(holder)


def runs(*held: tuple[Held, Held]) -> list[CellRun]:
    return [
        CellRun(CensusPoint(number, census(before)), CensusPoint(number, census(after)))
        for number, (before, after) in enumerate(held, 1)
    ]


def kept(count: int) -> Held:
    return {"kept[*]": (count, count * MIB), "model": (2, 8 * MIB)}


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


def test_growth_shows_at_second_run_and_is_judged_at_third() -> None:
    three = runs((kept(0), kept(1)), (kept(1), kept(2)), (kept(2), kept(3)))
    assert growing(three[:1]) == []
    assert [in_words(holding.group.anchor) for holding in growing(three[:2])] == ["kept[*]"]
    (growth,) = growing(three)
    assert (growth.nbytes, growth.rate) == (2 * MIB, MIB)
    finding = run_finding(growth, GroupDetail(also_held_by=[named("other")]), three)
    assert finding is not None
    assert (finding.kind, finding.bytes, finding.also_held_by) == ("leak", 3 * MIB, ["other"])
    assert "1.0 MiB more with every run of this cell" in (finding.mechanism or "")
    assert finding.evidence == [
        "censuses before and after the cell: run 1 added 1.0 MiB, run 2 added 1.0 MiB, run 3 added 1.0 MiB"
    ]


def test_a_container_with_a_bound_is_no_finding() -> None:
    three = runs((kept(0), kept(1)), (kept(1), kept(2)), (kept(2), kept(3)))
    (growth,) = growing(three)
    assert run_finding(growth, GroupDetail(bound=100, entries=90), three) is None


def test_each_finding_lists_what_its_own_holder_got() -> None:
    def held(count: int) -> Held:
        return {"kept[*]": (count, count * MIB), "more[*]": (count, 2 * count * MIB), "late": (1, 8 * MIB)}

    three = runs(*((held(count), held(count + 1)) for count in range(3)))
    evidence = {in_words(growth.path): run_finding(growth, GroupDetail(), three) for growth in growing(three)}
    assert {holder: finding.evidence[0] for holder, finding in evidence.items() if finding is not None} == {
        f"{holder}[*]": "censuses before and after the cell: "
        + ", ".join(f"run {number} added {size}" for number in (1, 2, 3))
        for holder, size in (("kept", "1.0 MiB"), ("more", "2.0 MiB"))
    }


def test_what_only_other_cells_keep_of_it_is_not_this_cells() -> None:
    """This cell makes one entry longer, other cells add entries."""
    three = runs(
        ({"kept": (1, MIB)}, {"kept": (1, 2 * MIB)}),
        ({"kept": (2, 3 * MIB)}, {"kept": (2, 4 * MIB)}),
        ({"kept": (3, 5 * MIB)}, {"kept": (3, 6 * MIB)}),
    )
    assert growing(three) == []


def test_what_is_made_once_or_anew_does_not_grow() -> None:
    model: Held = {"model": (2, 8 * MIB)}
    assert growing(runs(({}, model), (model, model), (model, model))) == []


def test_what_other_cells_add_is_not_this_cells() -> None:
    assert growing(runs((kept(0), kept(0)), (kept(5), kept(5)), (kept(9), kept(9)))) == []


def test_shown_values_have_a_cure_of_their_own() -> None:
    held = [{"Out[*]": (count, count * MIB)} for count in range(5)]
    three = runs((held[0], held[1]), (held[1], held[2]), (held[2], held[3]))
    (growth,) = growing(three)
    finding = run_finding(growth, GroupDetail(), three)
    assert finding is not None
    assert "%memtriage_free --out" in (finding.fix or "")


def test_holders_and_totals() -> None:
    held = census({"a": (1, MIB), "kib": (1, 1024), "small": (1, 1023)})
    assert [holder.holder for holder in holders(held)] == ["a", "kib"]
    assert [change.holder for change in changes(census({}), held)[0]] == ["a", "kib"]
    assert [change.holder for change in changes(held, census({}))[1]] == ["a", "kib"]
    assert by_device(held) == {"cpu": MIB + 2047}
