"""Leaks from censuses: which groups of storages grow, and which only move."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.growth.leaks import (
    CensusPoint,
    GroupGrowth,
    accumulates,
    growth_between,
    lengthens,
    persistent,
)
from memtriage.model.census import Census, GroupKey, HolderGroup
from memtriage.model.paths import HolderPath, PathSegment, SegmentKind, in_words
from support.paths import named

KIB = 1024
MIB = 1024 * KIB
LOSSES = "frame main(): losses[*]"


def group(
    name: str, count: int, nbytes: int, *, device: str = "cpu", by_path: dict[HolderPath, int] | None = None
) -> HolderGroup:
    anchor = named(name)
    paths = by_path or {anchor: nbytes}
    attached = any(path != anchor for path in paths)
    return HolderGroup(
        device=device, anchor=anchor, path=max(paths, key=lambda path: paths[path]), count=count,
        nbytes=nbytes, by_path=paths, owners={"variable": nbytes}, attached=attached,
    )  # fmt: skip


def point(
    position: int,
    *groups: HolderGroup,
    heads: dict[GroupKey, bytes] | None = None,
    interrupted: bool = False,
) -> CensusPoint:
    census = Census(storages=[], groups=list(groups), nodes_by_anchor={}, objects=0, nodes=0, seconds=0.0)
    return CensusPoint(position, census, heads or {}, interrupted)


def kept(position: int, count: int, each: int = 64 * KIB, anchor: str = LOSSES) -> CensusPoint:
    return point(position, group(anchor, count, count * each))


def anchors(growths: list[GroupGrowth]) -> list[str]:
    return [in_words(growth.group.anchor) for growth in growths]


# --- between two censuses -----------------------------------------------------------------------------------


def test_growth_is_what_came_since() -> None:
    before = point(
        8, group("a", 4, 400), group("b", 2, 900), group("gone", 1, 50), group("a", 1, 7, device="cuda:0")
    )
    after = point(
        12,
        group("a", 6, 700),
        group("b", 2, 900),
        group("new", 3, 30),
        group("a", 9, 9 * MIB, device="cuda:0"),
    )
    grown = growth_between(before, after)
    assert [(g.group.device, in_words(g.group.anchor), g.count, g.nbytes) for g in grown] == [
        ("cuda:0", "a", 8, 9 * MIB - 7),
        ("cpu", "a", 2, 300),
        ("cpu", "new", 3, 30),
    ]
    assert grown[1].distance == 4 and grown[1].rate == 75.0
    assert grown[1].key == ("cpu", named("a"))


def test_fewer_but_larger_storages_are_no_growth() -> None:
    assert growth_between(point(1, group("batch", 3, 300)), point(2, group("batch", 2, 900))) == []


def test_the_path_that_grew_most_is_the_holder() -> None:
    saved, context = (*named(LOSSES), *named("saved")), (*named(LOSSES), *named("context"))
    before = point(1, group(LOSSES, 4, 1100, by_path={saved: 1000, context: 100}))
    after = point(2, group(LOSSES, 6, 1700, by_path={saved: 1050, context: 650}))
    (growth,) = growth_between(before, after)
    assert growth.group.path == saved
    assert growth.path == context


def test_what_a_failing_step_holds_anew_is_not_growth() -> None:
    before = kept(8, 3)
    after = point(9, group(LOSSES, 5, 5 * 64 * KIB), group("frame forward(): x", 9, MIB), interrupted=True)
    assert anchors(growth_between(before, after)) == [LOSSES]


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 50), st.integers(1, 1 << 30))),
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 50), st.integers(1, 1 << 30))),
)
def test_growth_is_positive_sorted_and_of_the_later_census(
    one: dict[str, tuple[int, int]], other: dict[str, tuple[int, int]]
) -> None:
    before = point(3, *(group(name, *size) for name, size in one.items()))
    after = point(7, *(group(name, *size) for name, size in other.items()))
    grown = growth_between(before, after)
    assert [growth.nbytes for growth in grown] == sorted((g.nbytes for g in grown), reverse=True)
    for growth in grown:
        count, nbytes = one.get(in_words(growth.group.anchor), (0, 0))
        assert growth.nbytes == other[in_words(growth.group.anchor)][1] - nbytes > 0
        assert growth.count == other[in_words(growth.group.anchor)][0] - count >= 0
    assert growth_between(after, after) == []


# --- accumulation -------------------------------------------------------------------------------------------


def growth(count: int, nbytes: int, distance: int = 4, *, attached: bool = False) -> GroupGrowth:
    by_path = {(*named(LOSSES), *named("node")): nbytes} if attached else None
    return GroupGrowth(group(LOSSES, 99, nbytes, by_path=by_path), named(LOSSES), count, nbytes, distance)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (growth(4, 4 * 64 * KIB), True),
        (growth(1, 8 * KIB), True),
        (growth(0, 4 * MIB), False),  # nothing came: storages are larger
        (growth(4, 4 * KIB - 1), False),  # below a KiB per step
        (growth(100, 100 * 512), False),  # detached losses on CUDA: 512 bytes each
        (growth(100, 100 * 513), True),
        (growth(100, 100 * 512, attached=True), True),  # each leads to a graph
        (growth(400, 400 * 4), False),  # detached losses on the CPU
    ],
)
def test_accumulation_is_more_storages_that_are_no_log_entries(one: GroupGrowth, expected: bool) -> None:
    assert accumulates(one) is expected


# --- one storage that gets longer ---------------------------------------------------------------------------

HEAD = b"\1\2\3\4" * 16


def longer(sizes: list[int], heads: list[bytes | None], positions: list[int]) -> bool:
    points = [
        point(at, group("seen", 1, size), heads={} if head is None else {("cpu", named("seen")): head})
        for at, size, head in zip(positions, sizes, heads, strict=True)
    ]
    growths = [g for a, b in pairwise(points) for g in growth_between(a, b)]
    return lengthens(growths, points)


def test_a_tensor_that_begins_as_before_and_gets_longer_lengthens() -> None:
    assert longer([MIB, 2 * MIB, 3 * MIB], [HEAD, HEAD, HEAD], [3, 8, 12])


@pytest.mark.parametrize(
    "heads",
    [
        [HEAD, HEAD, b"\7" * 64],  # a batch that was longer this time
        [b"\7" * 64, HEAD, HEAD],
        [b"\0" * 64] * 3,  # zeros prove nothing
        [HEAD, HEAD, None],  # unreadable
        [None, None, None],
    ],
)
def test_a_replaced_batch_does_not_lengthen(heads: list[bytes | None]) -> None:
    assert not longer([MIB, 2 * MIB, 3 * MIB], heads, [3, 8, 12])


def test_two_sizes_make_no_trend() -> None:
    assert not longer([MIB, 2 * MIB], [HEAD, HEAD], [8, 12])


def test_less_than_a_kib_a_step_does_not_lengthen() -> None:
    assert not longer([MIB, MIB + 100, MIB + 200], [HEAD] * 3, [3, 8, 12])


def test_a_group_of_several_storages_does_not_lengthen() -> None:
    points = [
        point(at, group("seen", 2, at * MIB), heads={("cpu", named("seen")): HEAD}) for at in (3, 8, 12)
    ]
    growths = [g for a, b in pairwise(points) for g in growth_between(a, b)]
    assert len(growths) == 2 and not lengthens(growths, points)


# --- over all censuses --------------------------------------------------------------------------------------


def test_one_census_tells_nothing() -> None:
    assert persistent([]) == persistent([kept(8, 3)]) == []


def test_what_grew_between_two_censuses_is_found() -> None:
    (found,) = persistent([kept(8, 3), kept(12, 7)])
    assert (found.count, found.nbytes, found.distance, found.rate) == (4, 4 * 64 * KIB, 4, 64 * KIB)


def test_a_third_census_clears_what_stopped_growing() -> None:
    filled = [kept(8, 3), kept(12, 7), kept(20, 7)]
    assert persistent(filled[:2]) and persistent(filled) == []


def test_a_third_census_spans_the_whole_growth() -> None:
    (found,) = persistent([kept(8, 3), kept(12, 7), kept(20, 15)])
    assert (found.count, found.distance, found.rate) == (12, 12, 64 * KIB)


def test_a_storage_that_lengthens_needs_the_baseline() -> None:
    def seen(position: int) -> CensusPoint:
        return point(position, group("seen", 1, position * MIB), heads={("cpu", named("seen")): HEAD})

    assert persistent([seen(8), seen(12)]) == []
    (found,) = persistent([seen(8), seen(12)], seen(3))
    assert (found.count, found.nbytes, found.distance) == (0, 4 * MIB, 4)
    assert persistent([seen(8), seen(12)], seen(8)) == []  # no earlier than the first: no third size


def test_what_is_new_in_an_interrupted_step_is_a_part_of_no_growth() -> None:
    points = [kept(4, 2), point(8, group(LOSSES, 4, 256 * KIB), group("batch", 9, MIB), interrupted=True)]
    assert anchors(persistent(points)) == [LOSSES]


@pytest.mark.parametrize(("interrupted", "rate"), [(False, 25.0), (True, 20.0)])
def test_a_step_that_is_under_way_counts_in_full(interrupted: bool, rate: float) -> None:
    (growth,) = growth_between(
        point(4, group("a", 1, 100)), point(8, group("a", 2, 200), interrupted=interrupted)
    )
    assert growth.rate == rate


def test_accumulation_need_not_be_in_the_baseline() -> None:
    (found,) = persistent([kept(8, 3), kept(12, 7)], point(3))
    assert found.count == 4


def test_what_a_failing_step_holds_must_have_grown_before_too() -> None:
    hand = "frame main(): outputs[*]"

    def at(position: int, inputs: int, *, interrupted: bool = False) -> CensusPoint:
        groups = [group(LOSSES, position, position * MIB), group(hand, inputs, inputs * MIB)]
        return point(position, *groups, interrupted=interrupted)

    points = [at(9, 3), at(11, 8, interrupted=True)]
    assert anchors(persistent(points, at(3, 3))) == [LOSSES]
    assert anchors(persistent(points)) == [hand, LOSSES]  # nothing earlier to go by


def test_small_growth_is_left_out_on_its_own_device_only() -> None:
    def both(position: int) -> CensusPoint:
        return point(
            position,
            group(LOSSES, position, position * MIB, device="cuda:0"),
            group("small", position, position * 15 * KIB, device="cuda:0"),
            group("small", position, position * 15 * KIB),
        )

    kept_caches = persistent([both(8), both(12)])
    assert [(g.group.device, in_words(g.group.anchor)) for g in kept_caches] == [
        ("cuda:0", LOSSES),
        ("cpu", "small"),
    ]


@given(st.integers(1, 64), st.integers(1, 1 << 20), st.lists(st.integers(1, 20), min_size=2, max_size=4))
def test_a_steady_leak_has_its_rate_whatever_the_gaps(a_step: int, size: int, gaps: list[int]) -> None:
    each = 1024 + size
    positions = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    points = [kept(at, at * a_step, each) for at in positions]
    (found,) = persistent(points)
    assert found.rate == a_step * each
    assert found.distance == positions[-1] - positions[0]


@given(st.integers(0, 100), st.integers(0, 1 << 30), st.integers(2, 4))
def test_what_stays_as_it_is_never_grows(count: int, size: int, censuses: int) -> None:
    assert persistent([point(at, group(LOSSES, count, size)) for at in range(censuses)]) == []


def test_what_a_census_left_out_did_not_grow() -> None:
    left_out = (PathSegment(SegmentKind.NOT_SEARCHED),)
    groups = [msgspec.structs.replace(group("x", n, n * MIB), anchor=left_out) for n in (1, 2)]
    assert growth_between(point(3, groups[0]), point(6, groups[1])) == []


@pytest.mark.parametrize(("before", "after", "more"), [(2, 3, True), (3, 3, False), (None, 3, None)])
def test_more_entries_are_told_where_the_group_was_there_before(
    before: int | None, after: int, more: bool | None
) -> None:
    def entered(count: int, entries: int) -> HolderGroup:
        return msgspec.structs.replace(group(LOSSES, count, count * MIB), entries=entries)

    earlier = [] if before is None else [entered(1, before)]
    (growth,) = growth_between(point(3, *earlier), point(6, entered(2, after)))
    assert growth.entries_grow is more


def test_growth_of_a_kib_per_step_is_no_bookkeeping() -> None:
    assert accumulates(growth_between(kept(0, 1), kept(64, 2))[0])
    assert not accumulates(growth_between(kept(0, 1), kept(65, 2))[0])
