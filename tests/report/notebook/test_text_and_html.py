"""A cell's report as text and as a fragment of a page."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from memtriage.model.cell import CellReport, DeviceUse, Freed, HolderChange, MemoryNow, OutputHold, Rebinding
from memtriage.model.findings import Finding
from memtriage.model.judged import Judged
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.marks import Mark
from memtriage.model.paths import ANY_ITEM, PathSegment, SegmentKind
from memtriage.model.report import RankCount, RunReport
from memtriage.report.notebook.html import cell_html, freed_html, now_html
from memtriage.report.notebook.text import cell_text, freed_text, now_text
from support.paths import named

MIB = 1 << 20
HOSTILE = "cache['</div><script>alert(1)</script>']"
VOID = {"br"}


def change(holder: str, nbytes: int, count: int = 1) -> HolderChange:
    return HolderChange(device="cuda:0", holder=holder, bytes=nbytes, count=count, owner="variable")


def run_report(**given: Any) -> RunReport:
    fields: dict[str, Any] = {
        "verdict": "clean", "steps": 0, "findings": [], "marks": [], "ledger": {},
        "ranks": RankCount(seen=1, of=1),
    }  # fmt: skip
    return RunReport(**{**fields, **given})


def report(**given: Any) -> CellReport:
    fields: dict[str, Any] = {
        "label": "In[5]", "run": 1, "seconds": 1.25,
        "devices": [DeviceUse(device="cuda:0", before=MIB, after=4 * MIB, peak=9 * MIB)],
        "came": [change("kept[*]", 3 * MIB)], "went": [], "run_report": run_report(),
    }  # fmt: skip
    return CellReport(**{**fields, **given})


class Balanced(HTMLParser):
    """Reads a fragment; every element it opens it must close."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)


def both(one: CellReport) -> list[str]:
    """The words of both forms."""
    return [" ".join(cell_text(one).split()), Balanced(cell_html(one)).text]


def test_what_a_cell_changed() -> None:
    for words in both(report(went=[change("old.weight", -2 * MIB, -3)], notes=["said beside"])):
        assert "tensors +3.0 MiB on cuda:0" in words
        assert "In[5]" in words
        assert "9.0 MiB allocated" in words
        assert "kept[*]" in words
        assert "-2.0 MiB" in words
        assert "3 storages" in words
        assert "said beside" in words


def test_names_are_never_markup() -> None:
    finding = Finding(kind="leak", device="cpu", holder=HOSTILE, mechanism=f"`{HOSTILE}` grows", bytes=MIB)
    page = Balanced(
        cell_html(
            report(
                came=[change(HOSTILE, MIB)], notes=[HOSTILE], label=HOSTILE,
                run_report=run_report(verdict="leak", findings=[finding]),
                rebindings=[Rebinding(name=HOSTILE, device="cpu", old=1, new=1, still_held_by=[HOSTILE])],
            )
        )
    )  # fmt: skip
    assert "script" not in page.tags
    assert page.text.count(HOSTILE) >= 5


@pytest.mark.parametrize(
    ("verdict", "findings", "said"),
    [
        ("clean", [], "CLEAN no growth in 12 steps; tensors +3.0 MiB on cuda:0"),
        ("not_judged", [], "CELL 12 steps, all of them noisy; tensors +3.0 MiB on cuda:0"),
        (
            "leak",
            [Finding(kind="leak", device="cuda:0", holder="kept[*]", bytes=MIB)],
            "LEAK kept[*] grows with every run of this cell",
        ),
        (
            "leak",
            [Finding(kind="leak", device="cuda:0", holder="kept[*]", bytes=MIB, bytes_per_step=1024)],
            "LEAK 1.0 KiB per step on cuda:0, out of memory in 99 steps",
        ),
        (
            "out_of_memory",
            [Finding(kind="out_of_memory", device="cuda:0", bytes=MIB, step=3, phase="forward")],
            "OUT OF MEMORY cuda:0 at step 3, in forward: 1.0 MiB asked for",
        ),
    ],
)
def test_the_headline(verdict: Any, findings: list[Finding], said: str) -> None:
    judged = {"cuda:0": Judged(scale="step", points=12, reason="12 steps, all of them noisy")}
    run = run_report(verdict=verdict, findings=findings, steps=12, judged=judged)
    told = report(run_report=run, runs_out_in=[99 for _ in findings])
    for words in both(told):
        assert said.lower() in words.lower()


def test_a_process_that_is_watched_already_has_no_verdict() -> None:
    for words in both(report(run_report=None)):
        assert "cell tensors +3.0 mib on cuda:0" in words.lower()


def test_what_ipython_keeps_and_what_was_freed() -> None:
    outputs = [OutputHold(number=3, bytes={"cuda:0": 2 * MIB}, kind="Linear")]
    for words in both(report(outputs=outputs, traceback={"cuda:0": 5 * MIB})):
        assert "Out[3] (Linear) alone holds 2.0 MiB on cuda:0" in words
        assert "5.0 MiB on cuda:0; `%memtriage_free` releases" in words.replace(
            "; %memtriage_free", "; `%memtriage_free`"
        )
    freed = Freed(bytes={"cuda:0": 5 * MIB}, frames=2, outputs=[3], holders=[change("Out[*]", -MIB)])
    for words in (freed_text(freed, []), Balanced(freed_html(freed, [])).text):
        assert "freed 5.0 MiB on cuda:0: the traceback's variables (2 functions) and Out[3]" in words
    for words in (
        freed_text(Freed(bytes={}, frames=0), []),
        Balanced(freed_html(Freed(bytes={}, frames=0), [])).text,
    ):
        assert "nothing was kept" in words


STATE = named("optimizer.state")
OUTPUT = (PathSegment(SegmentKind.OUTPUT), ANY_ITEM)


def test_a_variable_made_anew() -> None:
    gone = Rebinding(name="model", device="cuda:0", old=4 * MIB, new=4 * MIB, extra=5 * MIB)
    held = Rebinding(name="net", device="cuda:0", old=MIB, new=MIB, still_held_by_paths=[STATE])
    shown = Rebinding(
        name="x",
        device="cuda:0",
        old=MIB,
        new=MIB,
        still_held_by_paths=[OUTPUT],
    )
    for words in both(report(rebindings=[gone, held, shown])):
        plain = words.replace("`", "")
        assert (
            "model was made while its old value (4.0 MiB) was alive: 5.0 MiB more in use on cuda:0" in plain
        )
        assert (
            "net is new, and its old value (1.0 MiB on cuda:0) is still alive, held by optimizer.state"
            in plain
        )
        assert "held by Out[*] . %memtriage_free --out" in plain.replace("Out[*].", "Out[*] .")


def test_the_course_is_drawn_where_it_rises() -> None:
    def marks(step_bytes: int) -> list[Mark]:
        return [
            Mark(
                name="step", step=step, microbatch=1, rank=None, time_s=step, device="cuda:0",
                allocated=MIB + step * step_bytes,
            )
            for step in range(1, 2000)
        ]  # fmt: skip

    drawn = cell_html(report(run_report=run_report(steps=1999, marks=marks(1 << 16))))
    assert "allocated on cuda:0" in Balanced(drawn).text
    assert len(drawn) < 30_000
    assert "<svg" not in cell_html(report(run_report=run_report(steps=1999, marks=marks(0))))


def rising(device: str, *values: int | None, name: str = "step") -> list[Mark]:
    return [
        Mark(name=name, step=step, microbatch=1, rank=None, time_s=step, device=device, allocated=value)
        for step, value in enumerate(values, 1)
    ]


@pytest.mark.parametrize(
    ("marks", "found_on", "drawn"),
    [
        (rising("cpu", MIB, 2 * MIB, 9 * MIB), None, "malloc in use on cpu at each step"),
        ([*rising("cpu", 1, 2, 3), *rising("cuda:1", 5, 6, 7)], None, "allocated on cuda:1 at each step"),
        ([*rising("cpu", 1, 2, 3), *rising("cuda:1", 5, 6, 7)], "cpu", "malloc in use on cpu at each step"),
        (
            [*rising("cpu", 1, 2, 3, name="backward"), *rising("cpu", 1, 2)],
            None,
            "malloc in use on cpu at each backward",
        ),
        (rising("cpu", 1, None, 2), None, None),
        (rising("cpu", 1, 2, 3, name="time"), None, None),
    ],
)
def test_whose_course_is_drawn(marks: list[Mark], found_on: str | None, drawn: str | None) -> None:
    findings = [] if found_on is None else [Finding(kind="leak", device=found_on, bytes_per_step=MIB)]
    page = cell_html(report(run_report=run_report(steps=3, marks=marks, findings=findings)))
    assert ("<svg" in page) == (drawn is not None)
    assert drawn is None or drawn in Balanced(page).text


def test_a_finding_names_its_entry_of_the_playbook() -> None:
    entry, none = (
        cell_html(report(run_report=run_report(findings=[Finding(kind="leak", device="cpu", playbook=name)])))
        for name in ("M1", None)
    )
    assert "M1" in Balanced(entry).text and "M1" not in Balanced(none).text


def test_names_that_utf_8_lacks_are_shown() -> None:
    assert "cache?[*]" in Balanced(cell_html(report(came=[change("cache\ud800[*]", MIB)]))).text


def test_what_holds_memory_now() -> None:
    rows = [
        LedgerRow(row="requested", bytes=3 * MIB, owner="parameter", detail=HOSTILE),
        LedgerRow(row="context", bytes=MIB),
    ]
    now = MemoryNow(
        ledgers=[Ledger(device="cuda:0", total=4 * MIB, source="driver", rows=rows)],
        holders=[change("model.fc.weight", 3 * MIB)], more={"cpu": 2048},
    )  # fmt: skip
    for words in (now_text(now), Balanced(now_html(now)).text):
        assert "model.fc.weight" in words
        assert "4.0 MiB" in words
        assert "and others: 2.0 KiB on cpu" in words
    assert "script" not in Balanced(now_html(now)).tags


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
