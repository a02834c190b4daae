"""`memtriage top`: a table of the ranks and what was found so far, printed once or over and over; JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from memtriage.diagnose.ranks.live import LiveView, RankLine
from memtriage.model.units import UNKNOWN, duration, size
from memtriage.report.console import GAP, Page, widths
from memtriage.report.findings import FindingGroup, fold
from memtriage.report.run.terminal import finding_block
from memtriage.report.run.words import VERDICTS, facts, notes, nothing_found, sentence
from memtriage.report.styles import BAD, SEVERITY_STYLES, Severity, color_of


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of ranks.

    Attributes:
        key: its name, as `--sort` takes it.
        title: what is above it.
        text: the cell of a rank.
        order: what the column is sorted by, of one type in a column; None sorts last.
        largest_first: the order in which it shows most.
        spare: the columns with the largest numbers go first where there is no room for all.
        left: aligned to the left.
    """

    key: str
    title: str
    text: Callable[[RankLine], str]
    order: Callable[[RankLine], Any]
    largest_first: bool = True
    spare: int = 0
    left: bool = False


def rate(growth: int | None) -> str:
    """Growth a step in words; a dash where nothing grows.

    >>> rate(2048), rate(0), rate(None)
    ('+2.0 KiB', '-', 'n/a')
    """
    if growth is None:
        return UNKNOWN
    return f"+{size(growth)}" if growth > 0 else "-"


def state(line: RankLine) -> str:
    """Return a rank's state in words; of one that has ended, its verdict."""
    if line.verdict is None:
        return line.state
    return f"ended: {VERDICTS[line.verdict][0]}" if line.verdict in VERDICTS else line.state


def age(line: RankLine) -> str:
    """Return how long ago a rank last wrote; nothing of one that has ended."""
    return "" if line.state == "ended" else duration(line.age_s)


def level(line: RankLine) -> Severity:
    """Return how much a rank's state matters."""
    if line.state == "killed":
        return "bad"
    if line.verdict in VERDICTS:
        return VERDICTS[line.verdict][1]
    return "warn" if line.state == "silent" else "good"


def style_of(column: Column, line: RankLine) -> str:
    """Return the style of a rank's cell."""
    if column.key == "growth" and line.growth:
        return BAD
    return color_of(level(line)) if column.key == "state" else ""


_STATES: Final = ("killed", "silent", "running", "ended")

COLUMNS: Final[tuple[Column, ...]] = (
    Column("rank", "rank", lambda x: str(x.rank or 0), lambda x: x.rank or 0, largest_first=False),
    Column(
        "host", "host", lambda x: x.host or "", lambda x: x.host, largest_first=False, spare=9, left=True
    ),
    Column(
        "device", "device", lambda x: x.device or "", lambda x: x.device, largest_first=False,
        spare=5, left=True,
    ),
    Column("step", "step", lambda x: f"{x.step:,}", lambda x: x.step, largest_first=False),
    Column("allocated", "allocated", lambda x: size(x.allocated), lambda x: x.allocated),
    Column("reserved", "reserved", lambda x: size(x.reserved), lambda x: x.reserved, spare=3),
    Column("peak", "peak", lambda x: size(x.peak), lambda x: x.peak, spare=4),
    Column("stranded", "stranded", lambda x: size(x.stranded), lambda x: x.stranded, spare=8),
    Column("rss", "host RSS", lambda x: size(x.host_rss), lambda x: x.host_rss, spare=2),
    Column("growth", "growth/step", lambda x: rate(x.growth), lambda x: x.growth),
    Column(
        "mark", "last mark", lambda x: x.last_mark or "", lambda x: x.last_mark, largest_first=False,
        spare=7, left=True,
    ),
    Column("age", "age", age, lambda x: x.age_s, spare=6),
    Column(
        "state", "state", state, lambda x: _STATES.index(x.state), largest_first=False, spare=1, left=True
    ),
)  # fmt: skip
BY_KEY: Final = {column.key: column for column in COLUMNS}


def columns_for(lines: Sequence[RankLine]) -> list[Column]:
    """The columns that say something of these ranks: hosts where there are several, what is known of any."""
    left_out = set()
    if len({line.host for line in lines}) < 2:
        left_out.add("host")
    if all(line.stranded is None for line in lines):
        left_out.add("stranded")
    return [column for column in COLUMNS if column.key not in left_out]


def ordered(lines: Sequence[RankLine], column: Column) -> list[RankLine]:
    """The ranks by a column, in the order in which it shows most; what is unknown comes last.

    Args:
        lines: the ranks.
        column: to sort by; ranks that are alike stay in their order.
    """
    known = [line for line in lines if column.order(line) is not None]
    unknown = [line for line in lines if column.order(line) is None]
    return sorted(known, key=column.order, reverse=column.largest_first) + unknown


def groups_of(view: LiveView) -> list[FindingGroup]:
    """Return the findings so far, those of several ranks drawn together."""
    if view.report is None or view.context is None:
        return []
    return fold(view.report.findings, view.context.runs_out_in)


def headline(view: LiveView) -> tuple[str, str, Severity]:
    """Return the verdict so far: its word, the sentence behind it, and how much it matters."""
    if view.report is None or view.context is None:
        return "waiting", view.waiting or "", "warn"
    word, weight = VERDICTS[view.report.verdict]
    groups = groups_of(view)
    if view.report.verdict in ("clean", "not_judged") and not view.finished:
        suspected = next(
            (f"{group.title(view.report)}, {group.amount}" for group in groups if group.suspected), None
        )
        return "running", suspected or f"{nothing_found(view.report)} so far", "good"
    return word, sentence(view.report, view.context, groups), weight


def subject(view: LiveView) -> list[str]:
    """Return what runs, and how far it is, each part short."""
    if view.report is None or view.context is None:
        return []
    parts = facts(view.report, view.context)
    if view.restart:
        parts.append(f"restart {view.restart}")
    states = [line.state for line in view.lines]
    if len(states) > 1:
        parts += [f"{states.count(state):,} {state}" for state in _STATES if state in states]
    return parts


def overview(view: LiveView) -> str:
    """Return what the ranks have in common, and who is the extreme; empty for a single rank."""
    if len(view.lines) < 2:
        return ""
    parts = [
        _range("allocated", [(line.allocated, line) for line in view.lines]),
        _range("host RSS", [(line.host_rss, line) for line in view.lines]),
    ]
    growing = [line for line in view.lines if line.growth]
    if growing:
        most = max(growing, key=lambda line: line.growth or 0)
        parts.append(f"{len(growing):,} grow, rank {most.rank or 0} most ({rate(most.growth)}/step)")
    steps = [line.step for line in view.lines]
    if max(steps) > min(steps):
        parts.append(f"steps {min(steps):,} to {max(steps):,}")
    return "; ".join(part for part in parts if part)


def _range(name: str, figures: Sequence[tuple[int | None, RankLine]]) -> str:
    known = [(value, line) for value, line in figures if value is not None]
    if not known:
        return ""
    most = max(known, key=lambda pair: pair[0])
    least = min(value for value, _ in known)
    if size(least) == size(most[0]):
        return f"{name} {size(least)} each"
    middle = median(value for value, _ in known)
    return f"{name} {size(least)} to {size(most[0])} (rank {most[1].rank or 0}), median {size(middle)}"


def render(view: LiveView, console: Console, column: Column) -> None:
    """Print where a run stands.

    On a terminal the columns that matter least are left out where there is no room; a file has them all.

    Args:
        view: the run.
        console: where to.
        column: by which ranks are sorted.
    """
    page = Page(console)
    word, said, weight = headline(view)
    page.verdict(word, SEVERITY_STYLES[weight], said)
    page.line((page.dot.join(subject(view)), "dim"))
    if text := overview(view):
        page.line((text, "dim"))
    page.gap()
    if view.report is not None and view.context is not None:
        lines = ordered(view.lines, column)
        _table(page, columns_for(view.lines), lines, console.width if console.is_terminal else None)
        for number, group in enumerate(groups_of(view), 1):
            finding_block(page, number, group, view.report)
        page.bullets("notes", notes(view.context))


_IDLE: Final = 9
"""Following a run waits this many times as long as reading its record takes: a tenth of a core."""


def follow(look: Callable[[], LiveView], console: Console, column: Column, every_s: float) -> None:
    """Show on a terminal where a run stands, until Ctrl-C.

    Args:
        look: reads the record.
        console: the terminal. Lines below its height are not shown.
        column: by which ranks are sorted.
        every_s: seconds between two looks, or more if the record is large.
    """
    with suppress(KeyboardInterrupt), console.screen() as screen:
        while True:
            begun = time.monotonic()
            stream = StringIO()
            drawn = Console(
                file=stream,
                width=console.width,
                force_terminal=True,
                color_system="standard" if console.color_system else None,
                highlight=False,
            )
            render(look(), drawn, column)
            screen.update(Text.from_ansi(stream.getvalue()))
            time.sleep(max(every_s, _IDLE * (time.monotonic() - begun)))


def as_json(view: LiveView) -> dict[str, Any]:
    """Return the same as JSON has it: the ranks' lines, and the findings so far."""
    assert view.report is not None and view.context is not None
    return {
        "schema": 1,
        "run_id": view.run_id,
        "restart": view.restart,
        "argv": view.context.argv,
        "verdict": view.report.verdict,
        "finished": view.finished,
        "steps": view.report.steps,
        "ranks": view.report.ranks,
        "by_rank": view.lines,
        "findings": view.report.findings,
        "ledger": view.report.ledger,
        "exception": view.report.exception,
        "notes": notes(view.context),
    }


def _table(page: Page, columns: Sequence[Column], lines: Sequence[RankLine], width: int | None) -> None:
    shown = list(columns)
    while True:
        heads = [page.text((column.title, "dim")) for column in shown]
        cells = [
            [page.text((column.text(line), style_of(column, line))) for column in shown] for line in lines
        ]
        wide = sum(each + GAP for each in widths([heads, *cells])) - GAP
        if width is None or len(shown) == 1 or wide <= width:
            break
        shown.remove(max(shown, key=lambda column: column.spare))
    page.table([heads, *cells], [column.left for column in shown])
