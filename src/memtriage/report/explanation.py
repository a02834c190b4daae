"""The terminal page of an explanation, its JSON, and a page of the playbook.

The page goes from the answer to its reasons: diagnosis, what failed, evidence, what to do, what is open.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import BinaryIO, Final

import msgspec
from rich.console import Console
from rich.text import Text

from memtriage.messages.grammar.sizes import as_printed
from memtriage.model.explanation import Explanation, Fix, Label, LogEvent, Maths
from memtriage.playbook.entries import PlaybookAction, PlaybookEntry
from memtriage.report import labels
from memtriage.report.console import BULLET, Page
from memtriage.report.styles import BAD, GOOD, PLAIN_WARN, WARN
from memtriage.report.text import count, rank_list

_LABELS: Final = 16
_MOST_FIXES: Final = 5
_MOST_EVENTS: Final = 8
_CAUSE_TEXT: Final = 240
_EVENT_TEXT: Final = 64
_SURE: Final = 0.9
_LIKELY: Final = 0.6

_SENTENCES: Final[dict[Label, tuple[str, str]]] = {
    "does_not_fit": ("DOES NOT FIT", "live bytes and the request exceed the device"),
    "fragmentation": ("FRAGMENTATION", "enough memory is free, but in holes that are each too small"),
    "other_process_or_outside_allocator": ("HELD BY OTHERS", "the memory is not this process's allocator's"),
    "allocator_limit": ("CAPPED", "a limit set for this process refused, not the device"),
    "driver_refused_though_free": ("DRIVER REFUSED", "the driver refused although memory was free"),
    "system_memory_fallback": ("SPILLED", "the device is over-full and the driver uses the host's memory"),
    "absurd_request": ("ABSURD REQUEST", "the size is not plausible: no memory setting can help"),
    "private_pools": ("PRIVATE POOLS", "the free memory is in the pools of CUDA graphs"),
    "host_memory_limit": ("HOST MEMORY LIMIT", "the host killed the process for its memory"),
    "host_alloc_failed": ("HOST ALLOCATION FAILED", "the host had no memory left"),
    "pinned_host": ("PINNED HOST MEMORY", "page-locked host memory ran out"),
    "shared_memory_exhausted": ("SHARED MEMORY FULL", "/dev/shm had no room"),
    "not_memory": ("NOT MEMORY", "nothing ran out of memory"),
    "killed_unproven": ("KILLED", "by a signal; the reason is not proven to be memory"),
    "library_alloc_failed": ("LIBRARY ALLOCATION FAILED", "a library got no memory from the driver"),
    "eval_or_graph_retention": ("RETENTION", "results or graphs of past steps are kept"),
    "informational": ("NO FAILURE", "the text reports memory, and no failure"),
    "unknown": ("UNKNOWN", "the text does not show why"),
}
_CALM: Final[frozenset[Label]] = frozenset({"informational", "not_memory"})
_MATHS: Final[dict[Maths, str]] = {
    "same": "same result",
    "rounding": "result differs by rounding",
    "approximate": "approximates the result",
    "different": "CHANGES the result",
}
_MATHS_STYLES: Final[dict[Maths, str]] = {
    "same": "dim",
    "rounding": "dim",
    "approximate": PLAIN_WARN,
    "different": WARN,
}


def write_json(explanation: Explanation, stream: BinaryIO) -> None:
    """Write an explanation as one line of JSON to a binary stream such as `sys.stdout.buffer`."""
    stream.write(msgspec.json.encode(explanation) + b"\n")


def render(explanation: Explanation, console: Console) -> None:
    """Print an explanation."""
    page = Page(console)
    _verdict(page, explanation)
    if explanation.evidence:
        page.heading(labels.EVIDENCE.capitalize())
        for line in explanation.evidence:
            page.field("", f"{BULLET}{line}", labels=2)
    _fixes(page, explanation.fixes)
    if explanation.stale_advice is not None:
        page.heading(labels.UNLIKELY.capitalize())
        page.field("", f"{BULLET}{explanation.stale_advice}", labels=2)
    if explanation.settle is not None:
        page.heading(labels.TO_CONFIRM.capitalize(), explanation.settle.fact)
        page.hanging(Text("  $ ", style="dim"), Text(page.plain(explanation.settle.command)), whole=True)
    _events(page, explanation.events)


def _verdict(page: Page, explanation: Explanation) -> None:
    word, sentence = _SENTENCES[explanation.diagnosis]
    style = GOOD if explanation.diagnosis in _CALM else BAD
    page.verdict(word, style, sentence)
    sure = explanation.confidence
    how = "proven by the text" if sure >= _SURE else "likely" if sure >= _LIKELY else "one of several"
    if explanation.diagnosis in ("unknown", "killed_unproven"):
        how = "what is missing is below" if explanation.settle else ""
    facts = [f"confidence {sure:.2f}", how]
    if explanation.also_possible:
        also = ", ".join(_SENTENCES[label][0].lower() for label in explanation.also_possible)
        facts.append(f"not ruled out: {also}")
    page.line((page.dot.join(fact for fact in facts if fact), "dim"))
    cause = next((event for event in explanation.events if event.role == "cause"), None)
    if cause is not None:
        page.gap()
        where = [cause.device or "", cause.source or "", f"line {cause.line:,}" if cause.line > 1 else ""]
        page.field("", textwrap.shorten(cause.text, _CAUSE_TEXT, placeholder=" ..."), labels=2)
        page.field("", page.dot.join(part for part in (cause.family, *where) if part), labels=2, style="dim")


def _fixes(page: Page, fixes: Sequence[Fix]) -> None:
    if not fixes:
        return
    page.heading("What to do", "in order of cost")
    for number, fix in enumerate(fixes[:_MOST_FIXES], 1):
        saves = f"saves up to {as_printed(fix.saves_bytes)}" if fix.saves_bytes else ""
        page.hanging(Text(f"  {number}. ", style="bold"), Text(page.plain(_sentence(fix.action))))
        page.hanging(Text("     "), Text(page.plain(f"{labels.WHY}: {fix.why}")))
        details = [saves, f"speed: {fix.costs}", _MATHS[fix.math], fix.playbook]
        text = page.dot.join(detail for detail in details if detail)
        page.hanging(Text("     "), Text(page.plain(text), style=_MATHS_STYLES[fix.math]))
    if len(fixes) > _MOST_FIXES:
        rest = ", ".join(dict.fromkeys(fix.playbook for fix in fixes[_MOST_FIXES:]))
        more = count(len(fixes) - _MOST_FIXES, "rung")
        page.line((f"  then {more} more: {rest} (`memtriage explain {fixes[_MOST_FIXES].playbook}`)", "dim"))


def _events(page: Page, events: Sequence[LogEvent]) -> None:
    if len(events) < 2:
        return
    page.heading("Events", "the first failure and what else the log has")
    shown = events
    if len(events) > _MOST_EVENTS:
        first = next((index for index, event in enumerate(events) if event.role == "cause"), 0)
        start = min(max(0, first - 2), len(events) - _MOST_EVENTS)
        shown = events[start : start + _MOST_EVENTS]
    width = max(len(f"{event.line:,}") for event in shown)
    for event in shown:
        mark = "->" if event.role == "cause" else "  "
        style = BAD if event.role == "cause" else "dim"
        who = f"{_who(event)}: " if _who(event) else ""
        times = f" x {event.count:,}" if event.count > 1 else ""
        what = "followed" if event.diagnosis is None else event.diagnosis.replace("_", " ")
        text = textwrap.shorten(event.text, _EVENT_TEXT, placeholder=" ...")
        before = Text(f"{mark} {event.line:>{width},}  ", style=style)
        page.hanging(
            before, Text(page.plain(f"{who}{what}{times}  {text}"), style="" if mark.strip() else "dim")
        )
    if len(shown) < len(events):
        page.line((f"   {len(events) - len(shown):,} more in --json", "dim"))


def _who(event: LogEvent) -> str:
    if event.ranks:
        return f"{'rank' if len(event.ranks) == 1 else 'ranks'} {rank_list(event.ranks)}"
    return event.source or ""


def _sentence(action: str) -> str:
    """Return an action with a capital, unless it begins with code."""
    return action if not action.split()[0].isalpha() else action[:1].upper() + action[1:]


# The playbook


def render_entry(entry: PlaybookEntry, console: Console) -> None:
    """Print an entry of the playbook."""
    page = Page(console)
    page.line((entry.name, "bold"), ("  ", ""), (entry.subject, "bold"))
    page.gap()
    page.line((entry.says, ""))
    for rung in (*entry.rungs, *entry.actions):
        page.gap()
        page.line((_sentence(rung.action), "bold"))
        for label, value in describe_rung(rung):
            page.field(label, value)


def describe_rung(rung: PlaybookAction) -> list[tuple[str, str]]:
    """Return what there is to say of a change, each with its heading."""
    maths = rung.maths if rung.maths_note is None else f"{rung.maths}; {rung.maths_note}"
    return [("saves", rung.saves), ("speed", rung.costs), ("result", maths), ("no help when", rung.no_help)]


def write_entry_json(entry: PlaybookEntry, stream: BinaryIO) -> None:
    """Write an entry of the playbook as one line of JSON."""
    stream.write(msgspec.json.encode({"schema": 1, **msgspec.to_builtins(entry)}) + b"\n")
