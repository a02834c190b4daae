"""Rows of a ledger: per parameter, and summed over owners."""

from __future__ import annotations

from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.run_status import rows_of

ROWS = [
    LedgerRow(row="tensors", owner="parameter", bytes=8),
    LedgerRow(row="malloc", bytes=5),
    LedgerRow(row="tensors", owner="gradient", bytes=4),
]


def test_bytes_per_parameter_need_a_model() -> None:
    ledgers = [Ledger(device="host", total=17, source="s", rows=ROWS, parameters=of) for of in (4, 0, None)]
    assert [ledger.per_parameter(ROWS[0]) for ledger in ledgers] == [2.0, None, None]


def test_rows_are_summed_over_owners_in_their_order() -> None:
    sums = rows_of(Ledger(device="host", total=17, source="s", rows=ROWS))
    assert list(sums.items()) == [("tensors", 12), ("malloc", 5)]
