"""The extension on one IPython shell: its magics, and the events between which a cell is watched.

`%%memtriage` removes its own line before IPython reads the cell, and looks at memory before and after it. So
the cell is an ordinary one: same namespace, same last value, same errors, and `await` works.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec
from IPython.core.error import UsageError
from IPython.display import display

from memtriage.integrations.notebook import options
from memtriage.integrations.notebook.header import TakeHeader, chosen_in
from memtriage.integrations.notebook.now import free_now, memory_now
from memtriage.integrations.notebook.watched_cell import CellOptions, WatchedCell
from memtriage.report.notebook.document import Document, cell_document, freed_document, now_document
from memtriage.report.notebook.html import html
from memtriage.report.notebook.text import text

_MAGIC: Final = options.LINE[1:]
_FREE: Final = options.FREE[1:]
_SCHEMA: Final = 1

Magic = tuple[Callable[..., Any], Literal["line", "cell"], str]


class Extension:
    """memtriage on a shell, from `install` to `remove`.

    Args:
        shell: an `IPython.core.interactiveshell.InteractiveShell`.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._cell_options = options.cell_parser()
        self._line_options = options.line_parser()
        self._free_options = options.free_parser()
        self._transformer = TakeHeader(self._cell_options, lambda: self._running is not None)
        self._magics: list[Magic] = [
            (self._line_magic, "line", _MAGIC),
            (self._cell_magic, "cell", _MAGIC),
            (self._free_magic, "line", _FREE),
        ]
        self._running: Any = None
        self._watched: tuple[WatchedCell, argparse.Namespace] | None = None

    def install(self) -> None:
        """Register magics, transformer and events."""
        shell = self._shell
        for function, kind, name in self._magics:
            shell.register_magic_function(function, magic_kind=kind, magic_name=name)
        # In front: it gets the lines as they were typed, as the event does.
        shell.input_transformer_manager.cleanup_transforms.insert(0, self._transformer)
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)

    def remove(self) -> None:
        """Take everything away again."""
        shell = self._shell
        shell.input_transformer_manager.cleanup_transforms.remove(self._transformer)
        shell.events.unregister("pre_run_cell", self._before_cell)
        shell.events.unregister("post_run_cell", self._after_cell)
        for _, kind, name in self._magics:
            shell.magics_manager.magics[kind].pop(name, None)
        if self._watched is not None:  # by the cell that is being watched
            self._watched[0].end(None, "")
            self._watched = None

    # --- a cell that begins with the magic ------------------------------------------------------------------

    def _before_cell(self, info: Any) -> None:
        if self._running is not None and not info.store_history:
            return  # the running cell runs another (`%%capture`)
        self._running = info
        lines = info.raw_cell.splitlines(keepends=True)
        chosen = chosen_in(lines, self._cell_options)
        if chosen is not None:
            watched = WatchedCell(
                self._shell, CellOptions(chosen.top, chosen.keep_traceback, chosen.directory)
            )
            watched.begin()
            self._watched = watched, chosen

    def _after_cell(self, result: Any) -> None:
        running = self._running
        if running is None:
            return
        if result is not None and result.info is not running and result.info.raw_cell != running.raw_cell:
            return
        self._running = None
        watched, self._watched = self._watched, None
        if watched is None:
            return
        error = None if result is None else result.error_in_exec or result.error_before_exec
        number = None if result is None else result.execution_count
        report = watched[0].end(error, f"In[{number or self._shell.execution_count}]")
        del error
        chosen = watched[1]
        if chosen.json:
            cell = msgspec.to_builtins(report)
            run = cell.pop("run_report") or {"schema": _SCHEMA}
            self._shell.user_ns[chosen.json] = {**run, "cell": cell}
        if not chosen.quiet:
            self._show(cell_document(report), chosen)

    # --- the magics -----------------------------------------------------------------------------------------

    def _cell_magic(self, line: str, cell: str) -> None:
        """Watch a cell; `%%memtriage -h` lists the options.

        Called where the line is not the cell's first, or its options are wrong, or ask for help.
        """
        if self._parsed(self._cell_options, line) is not None:
            raise UsageError(f"{options.CELL}: put it into the cell's first line, above other magics")

    def _line_magic(self, line: str) -> None:
        """Show what holds memory now; `%memtriage -h` lists the options."""
        chosen = self._parsed(self._line_options, line)
        if chosen is None:
            return
        now = memory_now(self._shell, chosen.top)
        if chosen.json:
            self._shell.user_ns[chosen.json] = {"schema": _SCHEMA, **msgspec.to_builtins(now)}
        self._show(now_document(now), chosen)

    def _free_magic(self, line: str) -> None:
        """Release what IPython keeps; `%memtriage_free -h` lists the options."""
        chosen = self._parsed(self._free_options, line)
        if chosen is None:
            return
        freed = free_now(self._shell, outputs=chosen.out)
        if chosen.json:
            self._shell.user_ns[chosen.json] = {"schema": _SCHEMA, "freed": msgspec.to_builtins(freed)}
        self._show(freed_document(freed), chosen)

    def _parsed(self, parser: argparse.ArgumentParser, line: str) -> argparse.Namespace | None:
        """The options; None when help was asked for, which is shown then."""
        chosen: argparse.Namespace = options.parse(parser, line)
        if chosen.help:
            print(parser.format_help())
            return None
        return chosen

    def _show(self, document: Document, chosen: argparse.Namespace) -> None:
        shown = {"text/plain": text(document)}
        if not chosen.no_html:
            shown["text/html"] = html(document)
        display(shown, raw=True)


_ATTRIBUTE: Final = "_memtriage_extension"


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext memtriage`: put the magics on a shell, unless they are there already."""
    if getattr(shell, _ATTRIBUTE, None) is None:
        extension = Extension(shell)
        extension.install()
        setattr(shell, _ATTRIBUTE, extension)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext memtriage`: take the magics off a shell."""
    extension: Extension | None = getattr(shell, _ATTRIBUTE, None)
    if extension is not None:
        extension.remove()
        setattr(shell, _ATTRIBUTE, None)
