"""The terminal page of an explanation, and a page of the playbook.

The page goes from the answer to its reasons: diagnosis, what failed, evidence, what to do, what is open. By
default it has at most `_MOST_LINES` lines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from rich.console import Console

from memtriage.messages.grammar.message import Message, as_printed, figures
from memtriage.model.explanation import Explanation, Fix, Label, LogEvent, Maths
from memtriage.model.units import count, rank_list
from memtriage.playbook.entries import PlaybookAction, PlaybookEntry
from memtriage.report import labels
from memtriage.report.console import Page
from memtriage.report.styles import BAD, GOOD, PLAIN_WARN, WARN

_MOST_LINES: Final = 20
_AMOUNTS: Final = tuple((facts, fixes) for fixes in (3, 2, 1) for facts in (3, 2, 1))
"""How many facts and actions the short page tries to show, until it is short enough."""
_MOST_EVENTS: Final = 8
_CAUSE_TEXT: Final = 240
_QUOTE: Final = 160
_EVENT_TEXT: Final = 64
_SURE: Final = 0.9
_LIKELY: Final = 0.6

_SENTENCES: Final[dict[Label, tuple[str, str]]] = {
    "does_not_fit": ("DOES NOT FIT", "the request is more than the device has left"),
    "fragmentation": ("FRAGMENTATION", "enough memory is free, but in holes that are each too small"),
    "other_process_or_outside_allocator": (
        "HELD BY OTHERS",
        "memory outside this process's allocator is what is missing",
    ),
    "allocator_limit": ("CAPPED", "a limit set for this process refused, not the device"),
    "driver_refused_though_free": ("DRIVER REFUSED", "the driver refused although memory was free"),
    "system_memory_fallback": ("SPILLED", "the device is overfull, and the driver uses the host's memory"),
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
_OPEN: Final[frozenset[Label]] = frozenset({"unknown", "killed_unproven"})
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


def render(explanation: Explanation, console: Console, *, full: bool = False) -> None:
    """Print an explanation: the most important facts and actions, or all of it."""
    page = Page(console)
    if full:
        _full(page, explanation)
        return
    for facts, actions in _AMOUNTS:
        with console.capture() as capture:
            _brief(page, explanation, facts, actions)
        if capture.get().count("\n") <= _MOST_LINES:
            break
    _brief(page, explanation, facts, actions)


def _brief(page: Page, explanation: Explanation, facts: int, actions: int) -> None:
    _verdict(page, explanation, _QUOTE)
    page.bullets("", explanation.evidence[:facts])
    _fixes(page, explanation.fixes[:actions], full=False)
    if not explanation.fixes or explanation.diagnosis in _OPEN:
        _confirm(page, explanation)
    left = [
        (len(explanation.evidence) - facts, "fact"),
        (len(explanation.fixes) - actions, "action"),
        (len(explanation.events) - 1, "event"),
    ]
    if more := [count(number, what) for number, what in left if number > 0]:
        page.line((f"  --full shows more: {', '.join(more)}", "dim"))


def _full(page: Page, explanation: Explanation) -> None:
    _verdict(page, explanation, _CAUSE_TEXT)
    page.bullets(labels.EVIDENCE.capitalize(), explanation.evidence)
    _fixes(page, explanation.fixes, full=True)
    if explanation.stale_advice is not None:
        page.bullets(labels.UNLIKELY.capitalize(), [explanation.stale_advice])
    _confirm(page, explanation)
    _events(page, explanation.events)


def _confirm(page: Page, explanation: Explanation) -> None:
    if explanation.settle is not None:
        page.heading(labels.TO_CONFIRM.capitalize(), explanation.settle.fact)
        page.hanging(("  $ ", "dim"), explanation.settle.command, whole=True)


def _headline(explanation: Explanation) -> str:
    """Return the sentence of a diagnosis; one that states a sum only where the figures make it."""
    size = figures(Message("mention", fields=explanation.fields))
    asked, total, live = size.requested, size.total, size.allocated
    if explanation.diagnosis == "does_not_fit" and asked is not None and total is not None:
        if asked > total:
            return "the request alone exceeds the device"
        if live is not None and live + asked > total:
            return "live bytes and the request exceed the device"
    return _SENTENCES[explanation.diagnosis][1]


def _verdict(page: Page, explanation: Explanation, longest: int) -> None:
    style = GOOD if explanation.diagnosis in _CALM else BAD
    page.verdict(_SENTENCES[explanation.diagnosis][0], style, _headline(explanation))
    sure = explanation.confidence
    how = "proven by the text" if sure >= _SURE else "likely" if sure >= _LIKELY else "one of several"
    if explanation.diagnosis in _OPEN:
        how = "what is missing is below" if explanation.settle else ""
    # In JSON it is then how sure it is that the text shows nothing, which no reader takes it for.
    facts = [how] if explanation.diagnosis == "unknown" else [f"confidence {sure:.2f}", how]
    if explanation.also_possible:
        also = ", ".join(_SENTENCES[label][0].lower() for label in explanation.also_possible)
        facts.append(f"not ruled out: {also}")
    if any(facts):
        page.line((page.dot.join(fact for fact in facts if fact), "dim"))
    cause = next((event for event in explanation.events if event.role == "cause"), None)
    if cause is not None:
        page.gap()
        where = [cause.device or "", cause.source or "", f"line {cause.line:,}" if cause.line > 1 else ""]
        page.field("", textwrap.shorten(cause.text, longest, placeholder=" ..."), labels=2)
        page.field("", page.dot.join(part for part in (cause.family, *where) if part), labels=2, style="dim")


def _fixes(page: Page, fixes: Sequence[Fix], *, full: bool) -> None:
    if fixes:
        page.heading("What to do")
    for number, fix in enumerate(fixes, 1):
        saves = f"saves up to {as_printed(fix.saves_bytes)}" if fix.saves_bytes else ""
        why, style = [f"{labels.WHY}: {fix.why}"], _MATHS_STYLES[fix.math]
        details = [saves, f"speed: {fix.costs}", _MATHS[fix.math], fix.playbook]
        if not full:
            result = _MATHS[fix.math] if fix.math in ("approximate", "different") else ""
            why, style, details = [], "dim", [fix.why, saves, result]
        text = page.dot.join(detail for detail in details if detail)
        page.numbered(number, _sentence(fix.action), *why, (text, style))


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
        what = "a consequence" if event.diagnosis is None else event.diagnosis.replace("_", " ")
        text = textwrap.shorten(event.text, _EVENT_TEXT, placeholder=" ...")
        before = (f"{mark} {event.line:>{width},}  ", style)
        page.hanging(before, (f"{who}{what}{times}  {text}", "" if mark.strip() else "dim"))
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
    page.line((f"{entry.name}  {entry.subject}", "bold"))
    page.gap()
    page.line(entry.says)
    for rung in (*entry.rungs, *entry.actions):
        page.gap()
        page.line((_sentence(rung.action), "bold"))
        for label, value in describe_rung(rung):
            page.field(label, value)


def describe_rung(rung: PlaybookAction) -> list[tuple[str, str]]:
    """Return what there is to say of a change, each with its heading."""
    maths = rung.maths if rung.maths_note is None else f"{rung.maths}; {rung.maths_note}"
    return [("saves", rung.saves), ("speed", rung.costs), ("result", maths), ("no help when", rung.no_help)]
