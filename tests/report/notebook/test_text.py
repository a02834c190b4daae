"""A cell's report as text, whole."""

from __future__ import annotations

from memtriage.model.cell import Freed, MemoryNow, OutputHold, Rebinding
from memtriage.model.findings import Finding
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.units import MIB
from memtriage.report.notebook.text import cell_text, freed_text, now_text
from support.cell_reports import change, report, run_report

CELL = """\
memtriage  LEAK  1.0 KiB per step on cuda:0, out of memory in 99 steps
In[5] · 1.2 s

1  leak on cuda:0   1.0 KiB per step
  kept alive by  kept[*]
  size           1.0 MiB

tensors
  cuda:0  1.0 MiB -> 4.0 MiB  (+3.0 MiB); most in use meanwhile: 9.0 MiB allocated

more than before
      +3.0 MiB  cuda:0  kept[*]   (1 storage, variable)

less than before
      -2.0 MiB  cuda:0  old.weight   (3 storages, variable)

old and new at once
  - `model` is new, and its old value (1.0 MiB on cuda:0) is still alive, held by `Out[3]`.
    `%memtriage_free --out` releases it

released
  - freed 5.0 MiB on cuda:0: the traceback's variables (2 functions)

holds memory now
       8.0 MiB  cuda:0  model   (2 storages, variable)

notes
  - said beside"""
NOW = """\
cuda:0  9.0 MiB in use
       8.0 MiB  requested · parameter
       1.0 MiB  releasable

holders of tensors
       8.0 MiB  cuda:0  model   (2 storages, variable)
  and others: 1.0 MiB on cuda:0"""

FREED = """\
memtriage  freed 1.0 MiB on cuda:0: the traceback's variables (1 function) and Out[3]

less than before
      -1.0 MiB  cuda:0  Out[*]   (1 storage, variable)

kept by IPython
  - Out[7] (Tensor) alone holds 1.0 MiB on cpu
  - `%memtriage_free --out` releases them; a cell whose last line ends with `;` shows nothing"""


def test_the_whole_text_of_a_cell() -> None:
    leak = Finding(kind="leak", device="cuda:0", holder="kept[*]", bytes=MIB, bytes_per_step=1024)
    told = report(
        went=[change("old.weight", -2 * MIB, -3)],
        notes=["said beside"],
        freed=Freed(bytes={"cuda:0": 5 * MIB}, frames=2),
        holders=[change("model", 8 * MIB, 2)],
        rebindings=[Rebinding(name="model", device="cuda:0", old=MIB, new=2 * MIB, still_held_by=["Out[3]"])],
        run_report=run_report(verdict="leak", findings=[leak], steps=12),
        runs_out_in=[99],
    )
    assert cell_text(told) == CELL


def test_the_whole_text_of_what_holds_memory_now() -> None:
    rows = [
        LedgerRow(row="requested", owner="parameter", bytes=8 * MIB),
        LedgerRow(row="releasable", bytes=MIB),
    ]
    ledger = Ledger(device="cuda:0", total=9 * MIB, source="", rows=rows)
    now = MemoryNow(ledgers=[ledger], holders=[change("model", 8 * MIB, 2)], more={"cuda:0": MIB})
    assert now_text(now) == NOW


def test_the_whole_text_of_what_was_freed() -> None:
    freed = Freed(bytes={"cuda:0": MIB}, frames=1, outputs=[3], holders=[change("Out[*]", -MIB)])
    assert freed_text(freed, [OutputHold(number=7, bytes={"cpu": MIB}, kind="Tensor")]) == FREED
    assert freed_text(Freed(bytes={}, frames=0), []) == "memtriage  nothing was kept"


def test_long_sentences_are_wrapped_under_their_beginning() -> None:
    told = cell_text(report(notes=["word " * 25], came=[])).splitlines()[-2:]
    assert told == [f"  - {' '.join(['word'] * 18)}", f"    {' '.join(['word'] * 7)}"]
    many = {f"cuda:{number}": MIB for number in range(8)}
    _, second = now_text(MemoryNow(ledgers=[], holders=[], more=many)).splitlines()
    assert second == "    MiB on cuda:4, 1.0 MiB on cuda:5, 1.0 MiB on cuda:6, 1.0 MiB on cuda:7"
    _, second = freed_text(Freed(bytes=many, frames=0), []).splitlines()
    assert second == "  MiB on cuda:4, 1.0 MiB on cuda:5, 1.0 MiB on cuda:6, 1.0 MiB on cuda:7"


def test_parts_without_anything_are_left_out() -> None:
    assert cell_text(report(came=[])) == BARE
    assert now_text(MemoryNow(ledgers=[], holders=[], more={})) == ""


BARE = """\
memtriage  CLEAN  tensors +3.0 MiB on cuda:0
In[5] · 1.2 s

tensors
  cuda:0  1.0 MiB -> 4.0 MiB  (+3.0 MiB); most in use meanwhile: 9.0 MiB allocated"""
