"""Rows of a ledger and the words of their details."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memtriage.account.claims import OwnedPart
from memtriage.account.ledger_words import biggest, count_of, join, pool_list, pools_of, row_of
from memtriage.model.blocks import Segment
from memtriage.model.ledger import LedgerRow

KIB = 1024


def part(pool: tuple[int, int], size: int) -> OwnedPart:
    return OwnedPart(pool=pool, owner="parameter", label="w", size=size)


def segment(pool: tuple[int, int], size: int) -> Segment:
    return Segment(device=0, address=0, size=size, stream=0, pool=pool, expandable=False, blocks=())


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: join("a", None, "", "b"), "a; b"),
        (lambda: count_of(1, "block"), "1 block"),
        (lambda: count_of(2, "process", "processes"), "2 processes"),
        (lambda: biggest([]), None),
        (lambda: biggest([("a", 512)]), "a 512 B"),
        (lambda: biggest([("a", KIB), ("b", 3 * KIB), ("a", 4 * KIB)]), "a 5.0 KiB in 2, b 3.0 KiB"),
        (lambda: biggest([("b", KIB), ("a", KIB), ("c", KIB)]), "a 1.0 KiB, b 1.0 KiB, c 1.0 KiB"),
        (
            lambda: biggest([("a", 4), ("b", 5), ("c", 6), ("d", 2), ("e", 1), ("e", 1)]),
            "c 6 B, b 5 B, a 4 B, 2 more 4 B",
        ),
        (lambda: pools_of([part((0, 0), KIB)]), None),
        (
            lambda: pools_of([part((0, 0), 9), part((0, 1), KIB), part((2, 0), 3 * KIB), part((0, 1), KIB)]),
            "private pools: 2.0 3.0 KiB, 0.1 2.0 KiB",
        ),
        (
            lambda: pool_list([segment((0, 1), KIB), segment((1, 0), 3 * KIB), segment((0, 1), KIB)]),
            "private pools by reserved bytes: 1.0 3.0 KiB, 0.1 2.0 KiB",
        ),
    ],
)
def test_words(made: Callable[[], str | None], text: str | None) -> None:
    assert made() == text


def test_a_row_has_its_details_joined_and_no_owner() -> None:
    assert row_of("stranded", 5, None, "in two segments", "page 2 MiB") == LedgerRow(
        row="stranded", bytes=5, owner=None, detail="in two segments; page 2 MiB"
    )
    assert row_of("stranded", 5, None).detail is None
