"""A cell's report as text, whole."""

from memtriage.model.cell import Freed, MemoryNow
from memtriage.model.findings import Finding
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.units import MIB
from memtriage.report.notebook.document import cell_document, freed_document, now_document
from memtriage.report.notebook.text import text
from support.cell_reports import change, report, run_report


def test_the_whole_text_of_a_cell() -> None:
    leak = Finding(kind="leak", device="cuda:0", holder="kept[*]", bytes=MIB, bytes_per_step=1024)
    told = report(
        went=[change("old.weight", -2 * MIB, -3)],
        notes=["said beside"],
        freed=Freed(bytes={"cuda:0": 5 * MIB}, frames=2),
        holders=[change("model", 8 * MIB, 2)],
        run_report=run_report(verdict="leak", findings=[leak], steps=12),
        runs_out_in=[99],
    )
    first, second, *parts = text(cell_document(told)).split("\n\n")
    assert first.splitlines()[0].startswith(
        "memtriage  LEAK  1.0 KiB per step on cuda:0, out of memory in 99"
    )
    assert second.startswith("1  leak on cuda:0   1.0 KiB per step\n  kept alive by  kept[*]\n")
    shown = dict(part.split("\n", 1) for part in parts)
    assert {name: " ".join(lines.split()) for name, lines in shown.items()} == {
        "Released": "- freed 5.0 MiB on cuda:0: the traceback's variables (2 functions)",
        "Tensors": "cuda:0 1.0 MiB -> 4.0 MiB (+3.0 MiB); most in use meanwhile: 9.0 MiB allocated",
        "More than before": "+3.0 MiB cuda:0 kept[*] (1 storage, variable)",
        "Less than before": "-2.0 MiB cuda:0 old.weight (3 storages, variable)",
        "Holds memory now": "8.0 MiB cuda:0 model (2 storages, variable)",
        "Notes": "- said beside",
    }


def test_the_whole_text_of_what_holds_memory_now() -> None:
    rows = [
        LedgerRow(row="requested", owner="parameter", bytes=8 * MIB),
        LedgerRow(row="releasable", bytes=MIB),
    ]
    ledger = Ledger(device="cuda:0", total=9 * MIB, source="", rows=rows)
    now = MemoryNow(ledgers=[ledger], holders=[change("model", 8 * MIB, 2)], more={"cuda:0": MIB})
    lines = [" ".join(line.split()) for line in text(now_document(now)).splitlines() if line]
    assert lines[:2] == ["memtriage MEMORY 9.0 MiB on cuda:0", "cuda:0 9.0 MiB in use"]
    assert lines[2].startswith("requested · parameter 8.0 MiB") and lines[2].endswith("88.9%")
    assert lines[3].startswith("releasable 1.0 MiB") and lines[3].endswith("11.1%")
    assert lines[4:] == [
        "Holders of tensors",
        "8.0 MiB cuda:0 model (2 storages, variable)",
        "and others: 1.0 MiB on cuda:0",
    ]


def test_the_text_of_what_was_freed() -> None:
    freed = Freed(bytes={"cuda:0": MIB}, frames=1, holders=[change("Out[*]", -MIB)])
    head, _, *rest = text(freed_document(freed)).splitlines()
    assert head == "memtriage  FREE  freed 1.0 MiB on cuda:0: the traceback's variables (1 function)"
    assert rest == ["Less than before", "      -1.0 MiB  cuda:0  Out[*]   (1 storage, variable)"]
    assert text(freed_document(Freed(bytes={}, frames=0))) == "memtriage  FREE  no tensor was released"
