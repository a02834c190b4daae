"""Rows of two sides are matched, and what is left over sums to the difference."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.difference.table import difference
from memtriage.model.difference import Difference, DifferenceRow, HeldRow, Side
from memtriage.model.units import MIB


def row(owner: str, nbytes: int, module: str | None = None, site: str | None = None, **more: Any) -> HeldRow:
    return HeldRow(owner=owner, bytes=nbytes, module=module, site=site, **more)


def side(*rows: HeldRow, instant: str = "the peak of backward", **more: Any) -> Side:
    total = sum(each.bytes for each in rows)
    return Side(of="prediction", name="a", instant=instant, total=total, rows=list(rows), **more)


def places(found: Difference) -> list[tuple[str, str | None, int]]:
    return [(each.owner, each.module, each.difference) for each in found.rows]


ROWS = st.lists(
    st.builds(
        row,
        st.sampled_from(["parameter", "activation"]),
        st.integers(1, 8),
        st.sampled_from([None, "a", "b", "c"]),
        st.sampled_from([None, "x.py:1 in f", "x.py:2 in f", "x.py:3 in g"]),
    ),
    max_size=8,
)


@given(ROWS, ROWS)
def test_the_rows_sum_to_the_difference(before: list[HeldRow], after: list[HeldRow]) -> None:
    old, new = side(*before), side(*after)
    found = difference(old, new)
    assert sum(each.difference for each in found.rows) == found.difference == new.total - old.total
    assert all(each.after - each.before == each.difference != 0 for each in found.rows)
    assert {each.owner for each in found.rows} <= {each.owner for each in (*before, *after)}


@given(ROWS)
def test_a_side_does_not_differ_from_itself(rows: list[HeldRow]) -> None:
    found = difference(side(*rows), side(*reversed(rows)))
    assert (found.rows, found.difference, found.suspects) == ([], 0, [])
    assert found.summary.startswith("no difference")


@given(ROWS, ROWS)
def test_the_other_way_round_it_is_the_opposite(before: list[HeldRow], after: list[HeldRow]) -> None:
    there, back = (difference(side(*a), side(*b)) for a, b in ((before, after), (after, before)))
    assert there.difference == -back.difference


def test_a_line_that_moved_is_the_same() -> None:
    before = side(
        row("activation", 8, "a", "m.py:10 in forward"), row("activation", 5, "a", "m.py:12 in forward")
    )
    after = side(
        row("activation", 8, "a", "m.py:14 in forward"), row("activation", 9, "a", "m.py:16 in forward")
    )
    (found,) = difference(before, after).rows
    assert (found.before, found.after, found.site) == (5, 9, "m.py:16 in forward")


def test_a_module_that_was_renamed_is_the_same_though_some_of_it_grew() -> None:
    def layer(name: str, activation: int) -> list[HeldRow]:
        return [row("parameter", 64, name), row("gradient", 32, name), row("activation", activation, name)]

    found = difference(side(*layer("mlp", 100)), side(*layer("feed_forward", 150)))
    assert places(found) == [("activation", "feed_forward", 50)]


def test_what_was_replaced_in_a_module_is_one_row() -> None:
    before = side(row("activation", 10, "attention", "m.py:5 in flash"))
    after = side(row("activation", 70, "attention", "m.py:9 in eager"))
    assert places(difference(before, after)) == [("activation", "attention", 60)]


def test_what_a_part_of_a_module_did_may_be_done_by_the_module() -> None:
    before = side(row("activation", 990, "(Model).(Loss)"), row("activation", 7, "other"))
    after = side(row("activation", 1000, "(Model)"), row("activation", 7, "other"))
    assert places(difference(before, after)) == [("activation", "(Model)", 10)]


@pytest.mark.parametrize(("more", "less"), [(100, 40), (40, 100)])
def test_what_goes_the_way_of_the_difference_comes_first(more: int, less: int) -> None:
    before = side(row("workspace", less), row("parameter", 7))
    after = side(row("activation", more), row("parameter", 7))
    found = difference(before, after)
    signs = [each.difference > 0 for each in found.rows]
    assert signs == ([True, False] if more > less else [False, True])


def test_ranks_are_compared_one_by_one() -> None:
    before = side(*(row("parameter", 10, rank=rank) for rank in (0, 1)))
    after = side(row("parameter", 10, rank=0), row("parameter", 13, rank=1))
    (found,) = difference(before, after).rows
    assert (found.rank, found.difference) == (1, 3)


def test_where_the_peak_moved_the_same_instants_are_compared() -> None:
    """A larger step of the optimizer: the activations of the peak before have nothing to do with it."""
    at_step = [row("gradient", 60), row("temporary", 10, phase="optimizer")]
    before = side(row("activation", 80), row("gradient", 20), others={"the peak of the optimizer": at_step})
    after = side(
        row("gradient", 60), row("temporary", 70, phase="optimizer"), instant="the peak of the optimizer"
    )
    found = difference(before, after)
    assert found.difference == 30
    assert places(found) == [("temporary", None, 60), ("the peak of backward was higher by", None, -30)]
    assert found.suspects == ["the peak moved: the peak of backward -> the peak of the optimizer"]


def test_the_sentence_says_how_much_of_it_is_what_and_where() -> None:
    before = side(row("activation", 100 * MIB, "layers[*].mlp", "model.py:31 in f"), row("parameter", MIB))
    after = side(
        row("activation", 300 * MIB, "layers[*].mlp", "model.py:31 in f"),
        row("activation", 50 * MIB, "layers[*].mlp", "model.py:32 in f"),
        row("parameter", 2 * MIB),
    )
    assert difference(before, after).summary == (
        "+251.0 MiB at the peak of backward: 250.0 MiB of it activation of `layers[*].mlp`, made at "
        "model.py:31 in f"
    )


def test_what_else_differs_is_told() -> None:
    before = side(row("parameter", 1), context={"torch": "2.11.0", "GPU": "H200", "peft": "0.1"})
    after = side(row("parameter", 1), context={"torch": "2.13.0", "GPU": "H200", "input of Net": "8x9 int64"})
    assert difference(before, after).suspects == [
        "torch: 2.11.0 -> 2.13.0",
        "peft: 0.1 -> none",
        "input of Net: none -> 8x9 int64",
    ]


def test_figures_beside_the_table_are_shown_of_both() -> None:
    found = difference(side(figures={"reserved": 3}), side(figures={"reserved": 5, "stranded": 1}))
    assert {name: (change.before, change.after) for name, change in found.figures.items()} == {
        "reserved": (3, 5),
        "stranded": (None, 1),
    }
    assert found.rows == list[DifferenceRow]()
