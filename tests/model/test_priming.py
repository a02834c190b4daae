"""What priming expects, in one line."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memtriage.model.priming import Priming, PrimingCheck, StatePool
from memtriage.model.units import MIB


def chosen(**given: Any) -> Priming:
    fields: dict[str, Any] = {
        "allocated": 80 * MIB, "reserved_before": 120 * MIB, "reserved_after": 84 * MIB, "steps": 4,
        "checks": [PrimingCheck(name="", before=120 * MIB, after=84 * MIB)], "seconds": 0.5,
    }  # fmt: skip
    return Priming(**{**fields, **given})


POOLS = [StatePool(size=20 * MIB, parameters=MIB), StatePool(size=10 * MIB, parameters=MIB)]
EXPECTED = "expected reserved 84.0 MiB instead of 120.0 MiB (1.050 instead of 1.500 of allocated)"


@pytest.mark.parametrize(
    ("given", "helps", "words"),
    [
        ({"blocks": [84 * MIB]}, True, f"1 block of 84.0 MiB in all; {EXPECTED}"),
        ({"blocks": [64 * MIB, 20 * MIB]}, True, f"2 blocks of 84.0 MiB in all; {EXPECTED}"),
        (
            {"settings": "large_segment_size_mb:512"},
            True,
            f"large_segment_size_mb:512; {EXPECTED}",
        ),
        (
            {"pools": POOLS, "reserved_without_pools": 90 * MIB},
            True,
            f"30.0 MiB for the optimizer's states; {EXPECTED}, 90.0 MiB if no pool can be made",
        ),
        (
            {"blocks": [84 * MIB], "pools": POOLS, "settings": "x:1", "reserved_without_pools": 90 * MIB},
            True,
            f"1 block of 84.0 MiB in all and 30.0 MiB for the optimizer's states and x:1; {EXPECTED}, "
            "90.0 MiB if no pool can be made",
        ),
        (
            {"blocks": [84 * MIB], "allocated": 0},
            True,
            "1 block of 84.0 MiB in all; expected reserved 84.0 MiB instead of 120.0 MiB "
            "(n/a instead of n/a of allocated)",
        ),
        ({"reason": "nothing helps"}, False, "priming would not help: nothing helps"),
    ],
)
def test_what_is_done_and_expected(given: dict[str, Any], helps: bool, words: str) -> None:
    priming = chosen(**given)
    assert (priming.helps, priming.in_words()) == (helps, words)
    again = msgspec.json.decode(msgspec.json.encode(priming), type=Priming)
    assert again == priming and not again.primed
