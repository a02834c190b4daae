"""The GPU memory of another process: its rows sum to what the driver counts."""

from __future__ import annotations

import pytest

from memtriage.account.process_ledger import gpu_rows


@pytest.mark.parametrize(
    ("owners", "in_use", "expected"),
    [
        ({"parameter": 100, "gradient": 500}, 2500, [("requested", "gradient", 500),
         ("requested", "parameter", 100), ("rest of the process", None, 1900)]),
        ({"variable": 1000}, None, [("requested", "variable", 1000)]),
        ({"variable": 1000}, 900, [("requested", "variable", 1000)]),
        ({}, 0, []),
    ],
    ids=["owners", "unknown", "more tensors than the driver counts", "unused"],
)  # fmt: skip
def test_what_is_no_tensor_is_one_row(
    owners: dict[str, int], in_use: int | None, expected: list[tuple[str, str | None, int]]
) -> None:
    assert [(row.row, row.owner, row.bytes) for row in gpu_rows(owners, in_use)] == expected
