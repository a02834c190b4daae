"""The live screen of `memtriage top`, with Textual: the ranks, and of the selected one its course and ledger.

Reading the record is done in a thread of its own, so keys are answered at once however many ranks there are.
"""

from __future__ import annotations

from io import StringIO
from typing import ClassVar, Final, Literal

from rich.console import Console
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.coordinate import Coordinate
from textual.events import Resize
from textual.widget import Widget
from textual.widgets import DataTable, Footer, Static

from memtriage.diagnose.ranks.live import LiveRun, LiveView, RankLine, course_of
from memtriage.model.units import count, size
from memtriage.report import plot
from memtriage.report.console import Page
from memtriage.report.run.terminal import finding_block, ledger_blocks
from memtriage.report.styles import PLAIN_BAD, PLAIN_GOOD, SEVERITY_STYLES, WARN
from memtriage.report.top.words import (
    BY_KEY,
    Column,
    columns_for,
    groups_of,
    headline,
    ordered,
    overview,
    style_of,
    subject,
)
from memtriage.store.reader import RankRecord

_READ_LIMIT_S: Final = 0.5
_LEAST_CHART: Final = (12, 3)
_UNKNOWN_WIDTH: Final = 80


class TopScreen(App[None]):
    """Shows a run in progress until it is quit.

    Args:
        run: what to follow.
        every_s: seconds between two looks at the record.
        column: by which ranks are sorted at first.
    """

    TITLE = "memtriage top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: auto; padding: 0 1; }
    #ranks { height: auto; max-height: 50%; border: round $primary; }
    #rank { height: 1fr; min-height: 8; }
    #course, #ledger, #findings { border: round $primary; padding: 0 1; }
    #ledger, #findings { scrollbar-gutter: stable; }
    #course { width: 2fr; height: 100%; }
    #ledger { width: 3fr; height: 100%; }
    #findings { height: 1fr; min-height: 3; }
    #findings.-none { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "sort by next column"),
        Binding("r", "turn", "reverse"),
        Binding("d", "device", "next device"),
        Binding("p,space", "pause", "pause"),
        Binding("tab", "app.focus_next", "next panel"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, run: LiveRun, every_s: float, column: Column) -> None:
        super().__init__()
        self.view = LiveView(waiting="reading the record")
        self.selected: int | None = None
        self.paused = False
        self.column = column
        self.turned = False
        self._live = run
        self._every_s = every_s
        self._device: str | None = None
        self._rows: list[tuple[str, list[Text]]] = []
        self._titles: list[str] = []

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield DataTable(id="ranks", cursor_type="row", zebra_stripes=True)
        with Horizontal(id="rank"):
            yield Static(id="course")
            with VerticalScroll(id="ledger"):
                yield Static()
        with VerticalScroll(id="findings"):
            yield Static()
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#ranks", DataTable).border_title = "ranks"
        self.query_one("#ledger").border_title = "where the memory is"
        self.query_one("#findings").border_title = "found so far"
        self._show()
        self._look()
        self.set_interval(self._every_s, self._look)

    # --- keys -----------------------------------------------------------------------------------------------

    def action_sort(self) -> None:
        columns = columns_for(self.view.lines)
        at = columns.index(self.column) if self.column in columns else -1
        self.column, self.turned = columns[(at + 1) % len(columns)], False
        self._show()

    def action_turn(self) -> None:
        self.turned = not self.turned
        self._show()

    def action_pause(self) -> None:
        self.paused = not self.paused
        self._show()
        self._look()

    def action_device(self) -> None:
        record = self._record()
        if record is not None:
            devices = sorted({mark.device for mark in record.marks if mark.allocated is not None})
            shown = self._device_of(record)
            at = devices.index(shown) if shown in devices else -1
            self._device = devices[(at + 1) % len(devices)] if devices else None
            self._show_rank()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if event.row_key is not None and event.row_key.value is not None:
            self.selected, self._device = int(event.row_key.value), None
            self._show_rank()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        chosen = BY_KEY[str(event.column_key.value)]
        self.column, self.turned = chosen, chosen is self.column and not self.turned
        self._show()

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self._show_below)

    # --- reading --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Reads the record in another thread, unless it still reads, or is not to."""
        if not self.paused and not any(worker.is_running for worker in self.workers):
            self.run_worker(self._read, thread=True, exit_on_error=True)

    def _read(self) -> None:
        view = self._live.refresh(_READ_LIMIT_S)
        self.call_from_thread(self._take, view)

    def _take(self, view: LiveView) -> None:
        if not self.paused:
            self.view = view
            self._show()

    # --- showing --------------------------------------------------------------------------------------------

    def _show(self) -> None:
        self.query_one("#head", Static).update(self._head())
        self._show_ranks()
        self._show_below()

    def _show_below(self) -> None:
        self._show_rank()
        self._show_findings()

    def _head(self) -> Text:
        view = self.view
        word, said, weight = headline(view)
        text = Text.assemble((word.upper(), SEVERITY_STYLES[weight]), "  ", (said, "bold"))
        more = [" · ".join(subject(view)), overview(view)]
        if view.behind:
            more.append(f"reading the record: {size(view.behind)} to go")
        if self.paused:
            text.append("   PAUSED", style=f"{WARN} reverse")
        for line in more:
            if line:
                text.append(f"\n{line}", style="dim")
        return text

    def _show_ranks(self) -> None:
        """Brings the table up to date: cell by cell while rows and columns are the same."""
        if self.view.catching_up and self._rows:
            return  # a thousand ranks, read for the first time: the table is worth its time once they are
        table = self.query_one("#ranks", DataTable)
        columns = columns_for(self.view.lines)
        lines = ordered(self.view.lines, self.column, turned=self.turned)
        titles = [self._title(column) for column in columns]
        rows = [(str(line.rank or 0), [_cell(column, line) for column in columns]) for line in lines]
        if not self.view.lines:
            rows = []
        with self.prevent(DataTable.RowHighlighted):
            if titles != self._titles or [key for key, _ in rows] != [key for key, _ in self._rows]:
                self._rebuild(table, columns, titles, rows)
            else:
                self._update(table, rows)
        self._titles, self._rows = titles, rows
        if self.selected is None and lines:
            self.selected = lines[0].rank or 0

    def _rebuild(
        self,
        table: DataTable[Text],
        columns: list[Column],
        titles: list[str],
        rows: list[tuple[str, list[Text]]],
    ) -> None:
        scrolled = table.scroll_y
        table.clear(columns=True)
        for column, title in zip(columns, titles, strict=True):
            table.add_column(Text(title, justify="left" if column.left else "right"), key=column.key)
        for key, cells in rows:
            table.add_row(*cells, key=key)
        keys = [key for key, _ in rows]
        if str(self.selected) in keys:
            table.move_cursor(row=keys.index(str(self.selected)), animate=False, scroll=False)
        table.scroll_to(y=scrolled, animate=False)

    def _update(self, table: DataTable[Text], rows: list[tuple[str, list[Text]]]) -> None:
        for number, ((_, before), (_, now)) in enumerate(zip(self._rows, rows, strict=True)):
            for column, (old, new) in enumerate(zip(before, now, strict=True)):
                if old != new or old.style != new.style:
                    table.update_cell_at(Coordinate(number, column), new, update_width=True)

    def _title(self, column: Column) -> str:
        if column is not self.column:
            return column.title
        return f"{column.title} {'▼' if column.largest_first != self.turned else '▲'}"

    def _record(self) -> RankRecord | None:
        """The record of the selected rank."""
        return next((record for record in self.view.records if record.number == self.selected), None)

    def _device_of(self, record: RankRecord) -> str | None:
        """The device that is shown of a rank."""
        if self._device is not None:
            return self._device
        return next((line.device for line in self.view.lines if (line.rank or 0) == record.number), None)

    def _show_rank(self) -> None:
        record = self._record()
        course, ledger = self.query_one("#course", Static), self.query_one("#ledger > Static", Static)
        if record is None:
            course.update("")
            course.border_title = "course"
            ledger.update("")
            return
        of = "" if record.start.rank is None else f" of {record.name}"
        device = self._device_of(record)
        name, marks = course_of(record, device)
        what = "malloc in use" if device == "cpu" else "allocated"
        course.border_title = f"{what} on {device}{of}, at each {name}" if device else f"course{of}"
        values = [mark.allocated for mark in marks if mark.allocated is not None]
        first, last = (marks[0].step, marks[-1].step) if marks else (0, 0)
        line = next((line for line in self.view.lines if (line.rank or 0) == record.number), None)
        grows = line is not None and line.device == device and bool(line.growth)
        steps = f"step {first:,} to {last:,}"
        course.update(_chart(values, steps, PLAIN_BAD if grows else PLAIN_GOOD, *_room(course)))
        panel = self.query_one("#ledger")
        panel.border_title = f"ledger{of}, as of its last census"
        ledger.update(_ledgers(record, _room(panel)[0]))

    def _show_findings(self) -> None:
        panel = self.query_one("#findings")
        groups = groups_of(self.view)
        panel.set_class(not groups, "-none")
        page, stream = _page(_room(panel)[0])
        if self.view.report is not None:
            for number, group in enumerate(groups, 1):
                finding_block(page, number, group, self.view.report)
        panel.border_title = count(len(groups), "finding") + (" so far" if not self.view.finished else "")
        panel.query_one(Static).update(_printed(stream))


def _cell(column: Column, line: RankLine) -> Text:
    justify: Literal["left", "right"] = "left" if column.left else "right"
    return Text(column.text(line), style=style_of(column, line), justify=justify)


def _room(widget: Widget) -> tuple[int, int]:
    """Columns and lines that a panel has for its text."""
    room = widget.scrollable_content_region
    return room.width or _UNKNOWN_WIDTH, room.height


def _chart(values: list[int], steps: str, style: str, width: int, height: int) -> Text:
    """A course as large as its panel, its highest and lowest value beside it, what it is now below."""
    if not values:
        return Text("no figures yet", style="dim")
    flat = plot.is_flat(values)  # then the axis begins at 0, so that noise does not look like growth
    high, low = size(max(values)), size(0 if flat else min(values))
    label = max(len(high), len(low))
    columns, lines = width - label - 2, height - 2
    text = Text()
    if columns >= _LEAST_CHART[0] and lines >= _LEAST_CHART[1]:
        drawn = plot.area(values, width=columns, height=lines, low=0 if flat else None)
        for name, line in zip(plot.axis_labels(lines, high, low), drawn, strict=True):
            text.append(f"{name} │", style="dim").append(f"{line}\n", style=style)
    return text.append(f"{'':>{label}} now {size(values[-1])}, {steps}", style="dim")


def _ledgers(record: RankRecord, width: int) -> Text:
    if not record.ledgers:
        return Text("none yet: the first is made at the end of the third step", style="dim")
    page, stream = _page(width)
    ledger_blocks(page, {device: ledger.rows for device, ledger in record.ledgers.items()})
    return _printed(stream)


def _page(width: int) -> tuple[Page, StringIO]:
    stream = StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=True,
        color_system="standard",
        highlight=False,
        legacy_windows=False,
    )
    return Page(console), stream


def _printed(stream: StringIO) -> Text:
    return Text.from_ansi(stream.getvalue().strip("\n"))
