"""Where a rank stands: ledgers' rows over owners."""

from __future__ import annotations

from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.run_status import RunStatus, rows_of


def test_rows_are_summed_over_owners_in_the_ledger_s_order() -> None:
    rows = [
        LedgerRow(row="requested", bytes=5, owner="parameter"),
        LedgerRow(row="rounding", bytes=-1),
        LedgerRow(row="requested", bytes=3, owner="gradient"),
    ]
    sums = rows_of(Ledger(device="cuda:0", total=7, source="", rows=rows))
    assert list(sums.items()) == [("requested", 8), ("rounding", -1)]
    assert rows_of(Ledger(device="cuda:0", total=0, source="", rows=[])) == {}


def test_what_is_not_known_of_a_rank_has_no_entry() -> None:
    status = RunStatus(rank=None, steps=0, marked_at=0.0)
    assert (status.latest, status.named, status.ledgers, status.leaks) == ((), (), (), ())
    assert status.stranded == status.limits == status.growth == status.host_classes == {}
    assert (status.host_rss, status.host_pinned, status.ledgers_at) == (None, None, None)
