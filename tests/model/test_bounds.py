"""Numbers in files that anybody may have written: what is read, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memtriage.model.bounds import MOST_RANKS, Rank, Ranks, Seconds


@pytest.mark.parametrize(
    ("bound", "read", "refused"),
    [
        (Seconds, [0.0, -1e10, 1e10, 1234], [-1.1e10, 1.1e10]),
        (Ranks, [1, 8, 1 << 20], [0, -1, (1 << 20) + 1]),
        (Rank, [0, 7, (1 << 20) - 1], [-1, 1 << 20]),
    ],
)
def test_bounds_hold_where_a_file_is_read(bound: Any, read: list[float], refused: list[float]) -> None:
    assert [msgspec.json.decode(msgspec.json.encode(number), type=bound) for number in read] == read
    for number in refused:
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(msgspec.json.encode(number), type=bound)
    assert MOST_RANKS == 1 << 20
