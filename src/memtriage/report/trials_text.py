"""A comparison on the terminal: the verdict, the table of variants, values, targets, what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from rich.console import Console
from rich.text import Text

from memtriage.model.trials import (
    AgainstBaseline,
    Failure,
    Figure,
    OutputValues,
    Spread,
    TargetRow,
    TargetVerdict,
    TrialsReport,
    TrialsVerdict,
    VariantRow,
)
from memtriage.model.units import UNKNOWN, count, four_digits, measured_time, rank_list, size
from memtriage.report.console import GAP, Page, widths
from memtriage.report.styles import BAD, PLAIN_GOOD, PLAIN_WARN, SEVERITY_STYLES, Severity

TIME: Final = "time_per_step"
VERDICTS: Final[dict[TrialsVerdict, tuple[str, Severity]]] = {
    "met": ("targets met", "good"),
    "missed": ("target missed", "bad"),
    "undecided": ("undecided", "warn"),
    "no_targets": ("compared", "good"),
}
"""Word and level of a verdict."""

MEMORY: Final = {
    "cuda": {"allocated": "allocated", "reserved": "reserved", "peak_reserved": "peak reserved"},
    "cpu": {"allocated": "malloc in use", "reserved": "malloc reserved", "peak_host_rss": "peak resident"},
}
"""Metrics of memory and their names in columns, by device: on a CPU the counters are malloc's."""
_FAILURES: Final = {
    "crashed": "crashed",
    "out_of_memory": "out of memory",
    "killed": "killed",
    "timed_out": "timed out",
    "no_figures": "no figures",
}
_SENSES: Final = {"at_most": "at most", "at_least": "at least", "equals": "the same as"}
_TARGET_STYLES: Final[dict[TargetVerdict, str]] = {
    "met": PLAIN_GOOD,
    "missed": BAD,
    "undecided": PLAIN_WARN,
}
_LABELS: Final = 18
_LEAST_NAME: Final = 12
_LONGEST_NAME: Final = 26
_TOLD: Final = 0.01
"""Differences of memory that are a smaller share are not told: two runs of one variant differ, too."""


def render(report: TrialsReport, console: Console) -> None:
    """Print a comparison."""
    page = Page(console)
    word, level = VERDICTS[report.verdict]
    page.verdict(word, SEVERITY_STYLES[level], sentence(report))
    page.line((f"{report.name}: {'; '.join(facts(report))}", "dim"))
    page.gap()
    table = _table(page, report)
    if table is not None:
        page.table(table, [True, *[False] * len(table[0][1:])])
        page.gap()
        page.line((legend(report), "dim"))
    else:
        for row in report.variants:
            page.line(
                (row.name, "bold"), (f"  {trial_counts(row)}{', baseline' if row.baseline else ''}", "dim")
            )
            for cell in cells(report, row):
                page.field(cell.column, "  ".join([cell.text, *cell.below.splitlines()]), labels=_LABELS)
    _values(page, report)
    _targets(page, report)
    for title, lines in remarks(report).items():
        page.bullets(title, lines)


def _table(page: Page, report: TrialsReport) -> list[list[Text]] | None:
    """Return the table's cells, of several lines each; None where the page is too narrow for it."""
    rows = [cells(report, row) for row in report.variants]
    heads = [page.text((cell.column, "dim")) for cell in rows[0]]
    figures = [
        [_lines(page, [page.text(cell.text)], cell.below.splitlines()) for cell in row] for row in rows
    ]
    room = page.width - sum(GAP + width for width in widths([heads, *figures]))
    if room < max(_LEAST_NAME, *(len(trial_counts(row)) for row in report.variants)):
        return None
    table = [[page.text(("variant", "dim")), *heads]]
    for row, beside in zip(report.variants, figures, strict=True):
        name = page.text((row.name, "bold")).wrap(page.console, min(room, _LONGEST_NAME), overflow="fold")
        below = [trial_counts(row), *(["baseline"] if row.baseline else [])]
        table.append([_lines(page, name, below), *beside])
    return table


def _lines(page: Page, first: Iterable[Text], below: Sequence[str]) -> Text:
    return Text("\n").join([*first, *(page.text((line, "dim")) for line in below)])


def _values(page: Page, report: TrialsReport) -> None:
    finished = [row for row in report.variants if row.finished]
    for name in report.variants[0].values if finished else ():
        page.heading(name, "read from the output")
        for row in finished:
            said = values(row, name, report.baseline)
            page.line((f"  {row.name}: ", "dim"), said, indent=4)


def _targets(page: Page, report: TrialsReport) -> None:
    if not report.targets:
        return
    page.heading("Targets")
    for row in report.targets:
        style = _TARGET_STYLES[row.verdict]
        page.line((f"  {row.verdict:<11}", style), target(row), indent=13)
        page.hanging(" " * 13, (target_result(row), "dim"))


def sentence(report: TrialsReport) -> str:
    """Return the verdict in a sentence."""
    if not report.targets:
        return f"{count(len(report.variants), 'variant')}, no targets"
    parts = []
    for verdict in ("met", "missed", "undecided"):
        number = sum(target.verdict == verdict for target in report.targets)
        if number:
            parts.append(f"{number} {verdict}")
    return f"{', '.join(parts)}, of {count(len(report.targets), 'target')}"


def facts(report: TrialsReport) -> list[str]:
    """Return what the figures rest on."""
    ended = sum(row.finished for row in report.variants)
    ranks = [] if report.ranks == 1 else [f"{report.ranks} ranks"]
    return [
        f"{ended} of {report.repeats * len(report.variants)} finished, interleaved",
        *ranks,
        f"steps end at mark {report.step!r}, without {count(report.warmup, 'warm-up step')}",
        f"memory at mark {report.mark!r}",
        f"compared with {report.baseline}",
    ]


def legend(report: TrialsReport) -> str:
    """Return what is below the figures of the table."""
    sizes = "lowest and highest rank" if report.ranks > 1 else "lowest and highest trial"
    return f"below a time: lowest and highest trial; below a ratio: its interval; below a size: {sizes}"


class Cell(NamedTuple):
    """A figure of a variant.

    Attributes:
        column: the name of its column.
        text: the figure in words.
        below: its spread in words, in one or two lines.
    """

    column: str
    text: str
    below: str


def cells(report: TrialsReport, row: VariantRow) -> list[Cell]:
    """Return a variant's figures: the time of a step, its ratio to the baseline's, and memory."""
    time = row.figures.get(TIME)
    memory = ((name, row.figures.get(metric)) for metric, name in MEMORY[report.device].items())
    return [
        _cell("time per step", time, measured_time),
        _ratio(f"x {report.baseline}", None if time is None else time.against_baseline),
        *(_cell(name, figure, size) for name, figure in memory),
    ]


def _cell(column: str, figure: Figure | None, words: Callable[[float], str]) -> Cell:
    """Return a figure with the lowest and the highest rank; of one rank, the lowest and the highest trial."""
    if figure is None:
        return Cell(column, UNKNOWN, "")
    low, high = figure.lowest, figure.highest
    if len(figure.by_rank) > 1:
        low, high = min(figure.by_rank.values()), max(figure.by_rank.values())
    return Cell(column, words(figure.value), _range(words(low), words(high)))


def _ratio(column: str, against: AgainstBaseline | None) -> Cell:
    """Return a ratio with its interval, and whether it shows a difference."""
    if against is None:
        return Cell(column, "-", "")
    below = "no interval"
    if against.spread is not None:
        noise = "\nwithin noise" if against.within_noise else ""
        below = f"{four_digits(against.spread.low)}-{four_digits(against.spread.high)}{noise}"
    return Cell(column, f"{four_digits(against.ratio)} x", below)


def interval(spread: Spread) -> str:
    """Return an interval with how sure it is.

    >>> interval(Spread(low=0.98, high=1.013, confidence=0.9375, basis="trials"))
    '0.980 to 1.013 (94 % confidence)'
    """
    over = "" if spread.basis == "trials" else ", over steps"
    sure = f"{100 * spread.confidence:.0f} % confidence{over}"
    return f"{four_digits(spread.low)} to {four_digits(spread.high)} ({sure})"


def _range(low: str, high: str) -> str:
    """Return two amounts as a range, a unit that they share once; nothing where they are the same.

    >>> _range("20.66 ms", "24.00 ms"), _range("1.2 MiB", "1.1 GiB"), _range("1.2 MiB", "1.2 MiB")
    ('20.66-24.00 ms', '1.2 MiB-1.1 GiB', '')
    """
    if low == high:
        return ""
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(f' {unit}') else low}-{high}"


def differing(report: TrialsReport, row: VariantRow) -> list[str]:
    """Return a line for each memory figure in which ranks stand out."""
    lines = []
    for metric, label in MEMORY[report.device].items():
        figure = row.figures.get(metric)
        if figure is None or not figure.differing_ranks:
            continue
        others = [value for rank, value in figure.by_rank.items() if rank not in figure.differing_ranks]
        held = ", ".join(size(figure.by_rank[rank]) for rank in figure.differing_ranks)
        whose = "rank" if len(figure.differing_ranks) == 1 else "ranks"
        usual = f"{size(min(others))} - {size(max(others))}" if len(others) > 1 else size(others[0])
        who = f"{whose} {rank_list(figure.differing_ranks)}"
        lines.append(f"{row.name}, {label}: {who} at {held}, others at {usual}")
    return lines


def trial_counts(row: VariantRow) -> str:
    """Return how many trials have figures, of how many."""
    return f"{row.finished} of {count(row.planned, 'trial')}"


def what_is_missing(row: VariantRow) -> list[str]:
    """Return why trials have no figures, in sentences."""
    lines = [failure(row, failed) for failed in row.failures]
    if row.skipped:
        lines.append(f"{row.name}: {count(row.skipped, 'trial')} left out after failures")
    return lines


def failure(row: VariantRow, failed: Failure) -> str:
    """Return what went wrong in trials of a variant."""
    rounds = rank_list(number + 1 for number in failed.rounds)
    where = f"{'round' if len(failed.rounds) == 1 else 'rounds'} {rounds}"
    return f"{row.name}: {_FAILURES[failed.kind]} in {where}: {failed.error}"


def values(row: VariantRow, name: str, baseline: str) -> str:
    """Return the course of a value read from the output, and whether it is the baseline's."""
    output: OutputValues = row.values[name]
    if not output.count:
        return "not printed"
    course = f"{output.first} -> {output.last}" if output.count > 1 else f"{output.first}"
    said = [f"{course} ({count(output.count, 'value')})"]
    if output.same_in_all_trials is False:
        said.append("differs between its own trials")
    if output.same_as_baseline:
        said.append(f"the same as {baseline}, value for value")
    elif output.same_as_baseline is False:
        where = "" if output.first_difference is None else f" from value {output.first_difference + 1} on"
        said.append(f"differs from {baseline}{where}")
    return ", ".join(said)


def target(row: TargetRow) -> str:
    """Return what a target demands."""
    return f"{row.variant}: {row.metric} {_SENSES[row.sense]} {row.limit_text}"


def target_result(row: TargetRow) -> str:
    """Return how a target was judged."""
    if row.value is None or row.limit is None:
        return row.why
    words = measured_time if row.metric == TIME else size if _is_size(row) else four_digits
    ratio = f", {interval(row.spread)} of it" if row.spread is not None else ""
    return f"{words(row.value)} against {words(row.limit)}{ratio}; {row.why}"


def _is_size(row: TargetRow) -> bool:
    return row.metric in {
        *("allocated", "reserved", "requested", "outside", "host_rss", "host_pinned"),
        *("peak_allocated", "peak_reserved", "peak_host_rss"),
    }


def found(report: TrialsReport) -> list[str]:
    """What the records of the variants say: why one needs more memory than the baseline, and findings."""
    lines = []
    for row in report.variants:
        by = row.difference
        if by is not None and abs(by.difference) >= _TOLD * by.before:
            lines.append(f"{row.name}: {by.summary}")
        lines += (f"{row.name}: {finding}" for finding in row.findings)
    return lines


def remarks(report: TrialsReport) -> dict[str, list[str]]:
    """Return what went wrong or stands out, in sentences below their titles."""
    rows = report.variants
    return {
        "Trials without figures": [line for row in rows for line in what_is_missing(row)],
        "Ranks that differ": [line for row in rows for line in differing(report, row)],
        "Found by memtriage run": found(report),
        "Notes": report.notes,
    }
