"""What processes answered that were asked for a census: on paper, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console

from memtriage.model.asked import Answer, HeldHere, Unanswered
from memtriage.model.units import count, duration, size
from memtriage.report.console import Page
from memtriage.report.run.terminal import ledger_blocks
from memtriage.report.styles import BAD, GOOD, HOLDER


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


def as_json(answers: Sequence[Answer], failed: Sequence[Unanswered]) -> dict[str, Any]:
    """Return the same as JSON has it, with every holder."""
    return {"schema": 1, "answers": [_plain(answer) for answer in answers], "failed": list(failed)}


def _plain(answer: Answer) -> dict[str, Any]:
    fields = msgspec.to_builtins(answer)
    ledgers = fields.pop("ledgers")
    del fields["refused"]
    return {**fields, "ledger": {ledger["device"]: ledger["rows"] for ledger in ledgers}}


def _one(page: Page, answer: Answer, rows: int) -> None:
    who = f"process {answer.pid}" if answer.rank is None else f"rank {answer.rank}"
    missing = f": {'; '.join(answer.incomplete)}" if answer.incomplete else ""
    head = ("incomplete census", BAD) if missing else ("census", GOOD)
    page.verdict(*head, f"{who}{_instant(answer)}{missing}")
    page.line((page.dot.join(_facts(answer)), "dim"))
    page.bullets("", answer.notes)
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
    for row in held[:rows]:
        holder = row.holder or f"{count(row.count, 'storage')} of smaller holders"
        owners = ", ".join(sorted(row.owners, key=lambda owner: -row.owners[owner]))
        known = f"{', '.join(row.known)}: " if row.known else ""
        detail = f"{page.dot}{owners}{page.dot}{count(row.count, 'storage')}"
        path = (f"{known}{holder}", HOLDER if row.holder else "")
        page.sized([size(row.bytes)], path, (detail, "dim"), whole=True)
    if rest := held[rows:]:
        nbytes, more = sum(row.bytes for row in rest), sum(row.count for row in rest)
        page.sized([size(nbytes)], (f"{count(more, 'storage')} of others", "dim"))
