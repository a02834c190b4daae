"""What processes answered that were asked for a census: on paper, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.text import Text

from memtriage.model.asked import Answer, HeldHere, Unanswered
from memtriage.model.units import count, duration, size
from memtriage.report.console import BULLET, Page
from memtriage.report.run.terminal import ledger_blocks
from memtriage.report.styles import BAD, GOOD, HOLDER

_SIZE_WIDTH: Final = 12


def render(answers: Sequence[Answer], console: Console, rows: int) -> None:
    """Print the answers, each with its ledgers and its largest holders.

    Args:
        answers: of one or more processes.
        console: where to.
        rows: holders to print of each.
    """
    page = Page(console)
    for number, answer in enumerate(answers):
        if number:
            page.gap()
        _one(page, answer, rows)


def as_json(answers: Sequence[Answer], failed: Sequence[Unanswered]) -> bytes:
    """Return the same as one line of JSON, with every holder."""
    said = {"schema": 1, "answers": [_plain(answer) for answer in answers], "failed": list(failed)}
    return msgspec.json.encode(said) + b"\n"


def _plain(answer: Answer) -> dict[str, Any]:
    fields = msgspec.to_builtins(answer)
    ledgers = fields.pop("ledgers")
    del fields["refused"]
    return {**fields, "ledger": {ledger["device"]: ledger["rows"] for ledger in ledgers}}


def _one(page: Page, answer: Answer, rows: int) -> None:
    who = f"process {answer.pid}" if answer.rank is None else f"rank {answer.rank}"
    missing = f": {'; '.join(answer.incomplete)}" if answer.incomplete else ""
    head = ("INCOMPLETE CENSUS", BAD) if missing else ("CENSUS", GOOD)
    page.line(head, ("  ", ""), (f"{who}{_instant(answer)}{missing}", "bold"))
    page.line((page.dot.join(_facts(answer)), "dim"))
    for note in answer.notes:
        page.line((f"  {BULLET}", "dim"), (note, ""), indent=4)
    ledger_blocks(page, {ledger.device: ledger.rows for ledger in answer.ledgers}, answer.rank)
    for device in dict.fromkeys(held.device for held in answer.holders):
        _holders(page, device, [held for held in answer.holders if held.device == device], rows)


def _instant(answer: Answer) -> str:
    if answer.step is None:
        return ""
    doing = "" if answer.doing is None else f", in {answer.doing}"
    return f" after {count(answer.step, 'step')}{doing}"


def _facts(answer: Answer) -> list[str]:
    parts = [
        " ".join(answer.argv),
        f"process {answer.pid} on {answer.host}" if answer.host else f"process {answer.pid}",
    ]
    if answer.objects:
        walked = f"{count(answer.objects, 'object')}, {count(answer.nodes, 'autograd node')}"
        parts += [walked, f"paused for {duration(answer.paused_s)}"]
    return [part for part in parts if part]


def _holders(page: Page, device: str, held: Sequence[HeldHere], rows: int) -> None:
    storages = sum(row.count for row in held)
    total = sum(row.bytes for row in held)
    page.heading(f"kept alive on {device}", f"{size(total)} in {count(storages, 'storage')}")
    shown = list(held[:rows])
    for row in shown:
        holder = row.holder or f"{count(row.count, 'storage')} of smaller holders"
        owners = ", ".join(sorted(row.owners, key=lambda owner: -row.owners[owner]))
        known = f"{', '.join(row.known)}: " if row.known else ""
        detail = Text.assemble(
            (page.plain(f"{known}{holder}"), HOLDER if row.holder else ""),
            (page.plain(f"{page.dot}{owners}{page.dot}{count(row.count, 'storage')}"), "dim"),
        )
        page.hanging(Text(f"  {size(row.bytes):>{_SIZE_WIDTH}}  "), detail, whole=True)
    if rest := held[rows:]:
        nbytes, more = sum(row.bytes for row in rest), sum(row.count for row in rest)
        page.line((f"  {size(nbytes):>{_SIZE_WIDTH}}  ", ""), (f"{count(more, 'storage')} of others", "dim"))
