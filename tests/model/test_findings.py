"""Findings: their words are made of paths, and what is derived from their figures."""

from __future__ import annotations

import msgspec
import pytest

from memtriage.model.cell import HolderChange
from memtriage.model.findings import Certainty, Finding, FindingKind, Projection
from support.paths import items_of, local

PATH, OTHER = items_of("main", "losses"), local("main", "last")


def test_words_are_made_of_paths_where_they_are_not_given() -> None:
    found = Finding(kind="leak", device="cpu", holder_path=PATH, also_held_by_paths=[OTHER])
    assert (found.holder, found.also_held_by) == ("frame main(): losses[*]", ["frame main(): last"])
    change = HolderChange(device="cpu", holder_path=PATH, bytes=1, count=1, owner="variable")
    assert change.holder == "frame main(): losses[*]"


def test_words_of_a_record_without_paths_stay() -> None:
    found = Finding(kind="leak", device="cpu", holder="losses", also_held_by=["last"])
    assert (found.holder, found.holder_path, found.also_held_by) == ("losses", None, ["last"])
    both = Finding(
        kind="leak",
        device="cpu",
        holder="as read",
        holder_path=PATH,
        also_held_by=["too"],
        also_held_by_paths=[OTHER],
    )
    assert (both.holder, both.also_held_by) == ("as read", ["too"])
    change = HolderChange(device="cpu", holder="x", holder_path=PATH, bytes=1, count=1, owner="variable")
    assert change.holder == "x"


def test_holders_are_told_apart_by_paths_where_there_are_any() -> None:
    assert Finding(kind="leak", device="cpu", holder_path=PATH).held_at == PATH
    assert Finding(kind="leak", device="cpu", holder="losses").held_at == "losses"
    assert Finding(kind="leak", device="cpu").held_at is None


def test_rates_that_are_known_the_most_telling_first() -> None:
    found = Finding(kind="leak", device="cpu", bytes_per_second=3, bytes_per_microbatch=0, bytes_per_step=1)
    assert list(found.rates.items()) == [("step", 1), ("micro-batch", 0), ("second", 3)]
    assert Finding(kind="leak", device="cpu", bytes_per_second=3).rates == {"second": 3}
    assert Finding(kind="leak", device="cpu").rates == {}


@pytest.mark.parametrize(
    ("kind", "certainty", "ahead"),
    [
        ("out_of_memory", "suspected", True),
        ("out_of_memory", None, False),
        ("leak", "suspected", False),
        ("leak", "proven", False),
    ],
)
def test_only_a_suspected_out_of_memory_error_is_ahead(
    kind: FindingKind, certainty: Certainty | None, ahead: bool
) -> None:
    found = Finding(kind=kind, device="cuda:0", certainty=certainty)
    assert found.ahead == ahead
    assert "ahead" not in msgspec.to_builtins(found)


def test_when_memory_runs_out_in_words() -> None:
    at_step = Projection(device="cuda:0", limit=1 << 30, step=12_345)
    assert str(at_step) == "at this rate cuda:0 (limit 1.0 GiB) is full at step 12,345"
    within = Projection(device="cpu", limit=1 << 30, microbatches=9)
    assert str(within) == "at this rate cpu (limit 1.0 GiB) is full 9 micro-batches into a step"
