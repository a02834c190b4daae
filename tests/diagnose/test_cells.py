"""From the censuses around a cell's executions to what grows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from memtriage.account.followed import Contents, FollowedHolders
from memtriage.diagnose.cells import CellRun, by_device, changes, growing, holders, leaks
from memtriage.model.census import Census, GroupDetail, HolderGroup
from memtriage.model.evidence import HolderSeen
from memtriage.model.findings import Finding
from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind, in_words
from memtriage.report.growth_words import findings_of
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


def runs(*held: tuple[Held, Held], heads: bytes | None = None) -> list[CellRun]:
    """Executions with what was held before and after each.

    Args:
        heads: what the storages of `kept` begin with at every census; None if that is unknown.
    """
    followed = FollowedHolders()
    contents = Contents({} if heads is None else {("cpu", path("kept")): heads}, {})

    def seen(found: Held) -> dict[int, HolderSeen]:
        return {each.id: each for each in followed.add(census(found), contents)}

    return [CellRun(number, seen(before), seen(after)) for number, (before, after) in enumerate(held, 1)]


def found(runs: list[CellRun], detail: GroupDetail) -> list[Finding]:
    """Findings after a closer look at every holder that grows."""
    rises = growing(runs)
    for _, seen in rises:
        seen.detail = detail
    return findings_of(leaks(runs, [rise for rise, _ in rises]))


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
    assert [rise.reason for rise, _ in growing(three[:2])] == ["few"]
    ((rise, seen),) = growing(three)
    assert (in_words(seen.anchor), len(rise.points), rise.rate) == ("kept[*]", 3, MIB)
    (finding,) = found(three, GroupDetail(also_held_by=[named("other")]))
    assert (finding.kind, finding.bytes, finding.also_held_by) == ("leak", 3 * MIB, ["other"])
    assert (finding.certainty, finding.step, finding.rates) == ("proven", None, {})
    assert (finding.mechanism or "").endswith(": 1.0 MiB more with every run of this cell")
    assert finding.evidence == [
        "3 censuses, at runs 1, 2, 3: 1.0 MiB, 2.0 MiB, 3.0 MiB at the same place; 2 more storages"
    ]


def test_a_container_with_a_bound_is_no_finding() -> None:
    three = runs((kept(0), kept(1)), (kept(1), kept(2)), (kept(2), kept(3)))
    assert found(three, GroupDetail(bound=100, entries=90)) == []


def test_each_finding_has_the_rate_of_its_own_holder() -> None:
    def held(count: int) -> Held:
        return {"kept[*]": (count, count * MIB), "more[*]": (count, 2 * count * MIB), "late": (1, 8 * MIB)}

    three = runs(*((held(count), held(count + 1)) for count in range(3)))
    assert {
        finding.holder: (finding.bytes, (finding.mechanism or "").rpartition(": ")[2])
        for finding in found(three, GroupDetail())
    } == {
        f"{holder}[*]": (3 * rate * MIB, f"{rate}.0 MiB more with every run of this cell")
        for holder, rate in (("kept", 1), ("more", 2))
    }


def test_whether_gradients_were_computed_in_another_cell_is_unknown() -> None:
    three = runs((kept(0), kept(1)), (kept(1), kept(2)), (kept(2), kept(3)))
    ((rise, seen),) = growing(three)
    seen.attached = True
    (finding,) = findings_of(leaks(three, [rise]))
    assert finding.fix is not None and "detach" in finding.fix and "no_grad" not in finding.fix


def test_what_the_first_run_made_and_others_add_to_grows() -> None:
    three = runs(({}, kept(6)), (kept(6), kept(7)), (kept(7), kept(8)))
    ((rise, seen),) = growing(three)
    assert (in_words(seen.anchor), rise.certainty, rise.rate) == ("kept[*]", "proven", MIB)


def test_what_a_variable_keeps_after_the_first_run_is_known_from_the_second() -> None:
    """`loss = ...; losses.append(loss)`: the newest entry is found at the variable."""

    def held(count: int) -> Held:
        entries = {"losses[*]": (count - 1, (count - 1) * MIB)} if count > 1 else {}
        return {**entries, **({"loss": (1, MIB)} if count else {})}

    three = runs(*((held(count), held(count + 1)) for count in range(3)))
    assert growing(three[:2]) == []
    (finding,) = found(three, GroupDetail())
    assert (finding.holder, finding.bytes, finding.certainty) == ("losses[*]", 2 * MIB, "proven")


def test_a_tensor_that_gets_longer_grows_and_one_that_is_replaced_does_not() -> None:
    longer: list[tuple[Held, Held]] = [
        ({"kept": (1, size * MIB)}, {"kept": (1, (size + 1) * MIB)}) for size in (1, 2, 3)
    ]
    (finding,) = found(runs(*longer, heads=b"the same"), GroupDetail())
    assert (finding.holder, finding.bytes) == ("kept", 4 * MIB)
    assert "torch.cat" in (finding.mechanism or "")
    assert growing(runs(*longer)) == []


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


def test_numbers_in_tensors_are_not_judged() -> None:
    few: list[Held] = [{"kept[*]": (1 + count, 1023 * count)} for count in range(4)]
    assert growing(runs(*pairwise(few))) == []


def test_shown_values_have_a_cure_of_their_own() -> None:
    held = [{"Out[*]": (count, count * MIB)} for count in range(5)]
    (finding,) = found(runs((held[0], held[1]), (held[1], held[2]), (held[2], held[3])), GroupDetail())
    assert "%memtriage_free --out" in (finding.fix or "")


def test_holders_and_totals() -> None:
    held = census({"a": (1, MIB), "kib": (1, 1024), "small": (1, 1023)})
    assert [holder.holder for holder in holders(held)] == ["a", "kib"]
    assert [change.holder for change in changes(census({}), held)[0]] == ["a", "kib"]
    assert [change.holder for change in changes(held, census({}))[1]] == ["a", "kib"]
    assert by_device(held) == {"cpu": MIB + 2047}
