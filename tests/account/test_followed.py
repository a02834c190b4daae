"""Numbers of holders: the same object, or a new one with the same content, keeps its number."""

from __future__ import annotations

import msgspec
import pytest

from memtriage.account.followed import Contents, FollowedHolders, changed
from memtriage.model.census import GroupKey, HolderGroup
from memtriage.model.evidence import HolderSeen
from memtriage.model.paths import ANY_ITEM, PathSegment, SegmentKind
from support.censuses import census, group
from support.paths import named

KIB, MIB = 1024, 1024**2
HEAD = b"\1\2\3\4" * 16
TAIL = bytes(range(64, 128))
SEEN: GroupKey = ("cpu", named("seen"))
NOTHING = Contents({}, {})


def followed(
    *censuses: list[HolderGroup], contents: list[Contents] | None = None, between: bool = True
) -> list[dict[int, HolderSeen]]:
    """Holders of successive censuses by number; the last census is between two positions if `between`."""
    holders = FollowedHolders()
    contents = contents or [NOTHING] * len(censuses)
    return [
        {
            seen.id: seen
            for seen in holders.add(census(*groups), of, between=between or groups is not censuses[-1])
        }
        for groups, of in zip(censuses, contents, strict=True)
    ]


def made(whole: HolderGroup, first: int, last: int) -> HolderGroup:
    """A group whose oldest and newest nodes have these numbers."""
    return msgspec.structs.replace(whole, made=(first, last))


# --- the same holder ----------------------------------------------------------------------------------------


def test_a_number_is_never_used_again() -> None:
    first, second, third = followed(
        [group("a", MIB, token=1), group("b", MIB, token=2)],
        [group("b", 2 * MIB, 2, token=2)],
        [group("b", 3 * MIB, 3, token=2), group("c", MIB, token=3)],
    )
    (b,) = second
    assert b in first and b in third
    assert third.keys() - {b} and not (third.keys() - {b}) & first.keys()


@pytest.mark.parametrize(
    ("later", "same"),
    [
        pytest.param(group("kept[*]", 9 * MIB, 9, token=1), True, id="the same list"),
        pytest.param(group("kept[*]", 9 * MIB, 9, token=2), False, id="another object of that name"),
        pytest.param(group("moved[*]", 9 * MIB, 9, token=1), True, id="the same list under another name"),
        pytest.param(group("kept", 9 * MIB, 9, token=1), False, id="another variable of the same module"),
    ],
)
def test_a_holder_is_the_same_object(later: HolderGroup, same: bool) -> None:
    before = group("kept[*]", 4 * MIB, 4, token=1, witnesses=range(4))
    first, second = followed(
        [before], [msgspec.structs.replace(later, witnesses=frozenset(range(20, 29)), entries=9)]
    )
    assert (first.keys() == second.keys()) is same


@pytest.mark.parametrize(
    ("queue", "entries", "same"), [(9, 9, True), (9, 3, True), (9, 4, True), (8, 9, False)]
)
def test_a_queue_of_objects_is_the_same_when_all_its_entries_are_new(
    queue: int, entries: int, same: bool
) -> None:
    before = group("jobs[*]", 4 * MIB, 4, token=1, witnesses=range(4), entries=4)
    after = group(
        "jobs[*]", entries * MIB, entries, token=2, witnesses=range(20, 20 + entries), entries=entries
    )
    first, second = followed(
        [msgspec.structs.replace(before, within=9)], [msgspec.structs.replace(after, within=queue)]
    )
    assert (first.keys() == second.keys()) is same


def test_a_new_object_with_most_of_the_storages_is_the_same_holder() -> None:
    before = group("state", 4 * MIB, 4, token=1, witnesses=range(4))
    kept, lost = (group("state", 5 * MIB, 5, token=2, witnesses=range(first, first + 5)) for first in (2, 3))
    first, second = followed([before], [kept])
    assert first.keys() == second.keys()
    first, second = followed([before], [lost])
    assert first.keys() != second.keys()


def test_a_running_total_is_recognized_by_its_oldest_node() -> None:
    """`logs["loss"] += loss` is a new tensor at each step, whose graph begins at the first."""
    total, later = (
        made(group("total", 4, token=at, nodes=9 * at, kept=KIB * at, witnesses=[at]), 1, 9 * at)
        for at in (1, 2)
    )
    first, second = followed([total], [later])
    assert first.keys() == second.keys()
    first, second = followed([total], [made(later, 2, 18)])
    assert first.keys() != second.keys()


@pytest.mark.parametrize(
    ("heads", "tails", "same"),
    [
        pytest.param(([HEAD], [HEAD]), ([], []), True, id="longer at its end"),
        pytest.param(([], []), ([HEAD], [HEAD]), True, id="longer at its beginning"),
        pytest.param(([HEAD, TAIL], [HEAD, TAIL, b"\7" * 64]), ([], []), True, id="a list of copies"),
        pytest.param(
            ([HEAD, TAIL, HEAD[::-1]], [TAIL, b"\7" * 64, b"\6" * 64]),
            ([], []),
            False,
            id="three batches, two new",
        ),
        pytest.param(([HEAD], [b"\7" * 64]), ([], []), False, id="another batch"),
        pytest.param(([bytes(64)], [bytes(64)]), ([], []), False, id="zeros prove nothing"),
        pytest.param(([], []), ([], []), False, id="not read"),
    ],
)
def test_tensors_that_are_replaced_by_longer_ones_or_more_are_recognized_by_content(
    heads: tuple[list[bytes], list[bytes]], tails: tuple[list[bytes], list[bytes]], same: bool
) -> None:
    first, second = followed(
        [group("seen", MIB, token=1, witnesses=[1])],
        [group("seen", 2 * MIB, token=2, witnesses=[2])],
        contents=[
            Contents({SEEN: frozenset(head)}, {SEEN: frozenset(tail)})
            for head, tail in zip(heads, tails, strict=True)
        ],
    )
    assert (first.keys() == second.keys()) is same
    assert [seen.continued for seen in second.values()] == [same]


# --- how it changed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("witnesses", "expected"), [(range(2, 7), False), (range(4, 9), True)])
def test_entries_of_a_queue_are_replaced(witnesses: range, expected: bool) -> None:
    _, after = followed(
        [group("queue[*]", 4 * MIB, 4, token=1, witnesses=range(4), entries=4)],
        [group("queue[*]", 5 * MIB, 5, token=1, witnesses=witnesses, entries=5)],
    )
    assert [seen.replaced for seen in after.values()] == [expected]


def test_a_graph_without_any_old_node_is_renewed() -> None:
    before, after = (
        made(
            group("loss", at * KIB, token=1, nodes=9 * at, witnesses=[at], entries=1), 100 * at, 100 * at + 9
        )
        for at in (1, 2)
    )
    assert [seen.renewed for seen in followed([before], [after])[1].values()] == [True]
    older = made(after, 50, 209)
    assert [seen.renewed for seen in followed([before], [older])[1].values()] == [False]


def test_the_path_is_the_one_that_grew_most() -> None:
    large, growing = (*named("model"), *named("weights")), (*named("model"), *named("cache"))
    first, second = (
        group("model", 10 * MIB, token=1, by_path={large: 9 * MIB, growing: at * MIB}) for at in (1, 2)
    )
    before, after = followed([first], [second])
    assert [seen.path for seen in before.values()] == [large]
    assert [seen.path for seen in after.values()] == [growing]


def test_host_memory_of_a_graph_on_a_gpu_is_a_holder_of_its_own() -> None:
    (found,) = followed([group("losses[*]", 4, token=1, device="cuda:0", nodes=60, kept=50 * KIB)])
    sizes = {seen.device: (seen.nbytes, seen.kept, seen.storages) for seen in found.values()}
    assert sizes == {"cuda:0": (4, 0, 1), "cpu": (0, 50 * KIB, 0)}


def test_what_a_partial_census_leaves_out_is_no_holder() -> None:
    anchor = (PathSegment(SegmentKind.NOT_SEARCHED, ""),)
    assert followed([msgspec.structs.replace(group("rest", MIB, token=1), anchor=anchor)]) == [{}]


# --- the end, and what is written ---------------------------------------------------------------------------


def test_at_the_end_a_holder_keeps_the_path_it_had_while_functions_ran() -> None:
    """Once `main()` has returned, its list may still be found under the name of a global one."""
    first, last = followed(
        [group("losses[*]", 4 * MIB, 4, token=1)], [group("elsewhere[*]", 5 * MIB, 5, token=1)], between=False
    )
    (before,), (after,) = first.values(), last.values()
    assert (after.id, after.anchor, after.nbytes) == (before.id, before.anchor, 5 * MIB)


def test_at_the_end_a_holder_of_one_entry_may_have_more() -> None:
    """Of the results of one evaluation the path has its name, of several it has none."""
    kept = PathSegment(SegmentKind.ATTRIBUTE, "kept")
    one = (*named("results"), PathSegment(SegmentKind.ITEM, "'first'"), kept)
    any_one = (*named("results"), ANY_ITEM, kept)
    first, last = followed(
        [msgspec.structs.replace(group("results", MIB, token=1), anchor=one, path=one)],
        [msgspec.structs.replace(group("results", 3 * MIB, 3, token=1), anchor=any_one, path=any_one)],
        between=False,
    )
    (before,), (after,) = first.values(), last.values()
    assert (before.anchor, after.anchor, after.id) == (one, any_one, before.id)


@pytest.mark.parametrize("kind", [{"between": False}, {"partial": True}])
def test_what_a_census_of_another_kind_does_not_find_is_remembered(kind: dict[str, bool]) -> None:
    holders = FollowedHolders()
    here = census(group("losses[*]", 4 * MIB, 4, token=1))
    (before,) = holders.add(here, NOTHING)
    assert holders.add(census(), NOTHING, **kind) == []
    assert [seen.id for seen in holders.add(here, NOTHING)] == [before.id]
    assert holders.add(census(), NOTHING) == []
    assert [seen.id for seen in holders.add(here, NOTHING)] != [before.id]


def test_only_what_changed_is_written() -> None:
    stays, grows, goes = (
        HolderSeen(id=number, device="cpu", anchor=named("a"), path=named("a"), nbytes=MIB)
        for number in (1, 2, 3)
    )
    written: dict[int, HolderSeen] = {}
    assert changed([stays, grows, goes], written) == ([stays, grows, goes], [])
    grown = msgspec.structs.replace(grows, nbytes=2 * MIB)
    assert changed([stays, grown], dict(written), forget=False) == ([grown], [3])
    assert changed([stays, grown], written) == ([grown], [3])
    assert changed([stays, grown], written) == ([], [])
