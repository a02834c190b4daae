"""The extension on one IPython shell: its magics, and the events between which a cell is watched.

`%%memtriage` removes its own line before IPython reads the cell, and looks at memory before and after it. So
the cell is an ordinary one: same namespace, same last value, same errors, and `await` works.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec
from IPython.core.error import UsageError
from IPython.core.magic import output_can_be_silenced
from IPython.display import display

from memtriage.integrations.notebook import options
from memtriage.integrations.notebook.header import TakeHeader, chosen_in
from memtriage.integrations.notebook.now import free_now, memory_now
from memtriage.integrations.notebook.watched_cell import CellHistory, CellOptions, WatchedCell
from memtriage.model.cell import CellReport
from memtriage.report.notebook.html import cell_html, freed_html, now_html
from memtriage.report.notebook.text import cell_text, freed_text, now_text

_MAGIC: Final = options.LINE[1:]
_FREE: Final = options.FREE[1:]
_SCHEMA: Final = 1

Magic = tuple[Callable[..., Any], Literal["line", "cell"], str]


class Shown:
    """What a magic shows: HTML where there is a page, text everywhere.

    Args:
        text: plain text.
        html: a fragment of a page; None for text alone.
    """

    def __init__(self, text: str, html: str | None) -> None:
        self._text = text
        self._html = html

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        bundle = {"text/plain": self._text}
        if self._html is not None:
            bundle["text/html"] = self._html
        return bundle


class Extension:
    """memtriage on a shell, from `install` to `remove`.

    Args:
        shell: an `IPython.core.interactiveshell.InteractiveShell`.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._history = CellHistory()
        self._cell_options = options.cell_parser()
        self._line_options = options.line_parser()
        self._free_options = options.free_parser()
        self._transformer = TakeHeader(self._cell_options, lambda: self._running is not None)
        self._magics: list[Magic] = [
            (_documented(self._line_magic, self._line_options), "line", _MAGIC),
            (output_can_be_silenced(_documented(self._cell_magic, self._cell_options)), "cell", _MAGIC),
            (_documented(self._free_magic, self._free_options), "line", _FREE),
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
            body = "".join(lines).strip().partition("\n")[2].strip()
            self._watched = self._begin(body, chosen), chosen

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
        self._show_cell(report, watched[1])

    def _begin(self, body: str, chosen: argparse.Namespace) -> WatchedCell:
        asked = CellOptions(
            census=chosen.census,
            top=chosen.top,
            keep_traceback=chosen.keep_traceback,
            directory=chosen.directory,
        )
        watched = WatchedCell(self._shell, body, self._history, asked)
        watched.begin()
        return watched

    def _show_cell(self, report: CellReport, chosen: argparse.Namespace) -> None:
        if chosen.json:
            cell = msgspec.to_builtins(report)
            run = cell.pop("run_report") or {"schema": _SCHEMA}
            self._shell.user_ns[chosen.json] = {**run, "cell": cell}
        if not chosen.quiet:
            self._show(cell_text(report), lambda: cell_html(report), chosen)

    # --- the magics -----------------------------------------------------------------------------------------

    def _cell_magic(self, line: str, cell: str) -> Any:
        """Called inside another magic, by `run_cell_magic`, and when the line's options are wrong."""
        __tracebackhide__ = True
        chosen = self._parsed(self._cell_options, line)
        if chosen is None:
            return None
        if self._watched is not None:
            raise UsageError(f"{options.CELL}: this cell is watched already")
        if awaits(self._shell, cell):
            raise UsageError(
                f"{options.CELL}: put it into the cell's first line: only there may the cell await"
            )
        chosen.keep_traceback = True  # IPython has yet to show it
        number = cell_number(self._shell)
        watched = self._begin(cell.strip(), chosen)
        error: BaseException | None = None
        try:
            return run_body(self._shell, cell)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._show_cell(watched.end(error, f"In[{number}]"), chosen)
            del error

    def _line_magic(self, line: str) -> None:
        chosen = self._parsed(self._line_options, line)
        if chosen is None:
            return
        now = memory_now(self._shell, chosen.top)
        if chosen.json:
            self._shell.user_ns[chosen.json] = {"schema": _SCHEMA, **msgspec.to_builtins(now)}
        self._show(now_text(now), lambda: now_html(now), chosen)

    def _free_magic(self, line: str) -> None:
        chosen = self._parsed(self._free_options, line)
        if chosen is None:
            return
        freed, left = free_now(self._shell, outputs=chosen.out)
        if chosen.json:
            result = {"freed": msgspec.to_builtins(freed), "outputs": msgspec.to_builtins(left)}
            self._shell.user_ns[chosen.json] = {"schema": _SCHEMA, **result}
        self._show(freed_text(freed, left), lambda: freed_html(freed, left), chosen)

    def _parsed(self, parser: argparse.ArgumentParser, line: str) -> argparse.Namespace | None:
        """The options; None when help was asked for, which is shown then."""
        try:
            chosen: argparse.Namespace = options.parse(parser, line)
        except options.UsageProblem as problem:
            raise UsageError(str(problem)) from None
        if chosen.help:
            print(parser.format_help())
            return None
        return chosen

    def _show(self, text: str, html: Callable[[], str], chosen: argparse.Namespace) -> None:
        display(Shown(text, None if chosen.no_html else html()))


def _documented(method: Callable[..., Any], parser: argparse.ArgumentParser) -> Callable[..., Any]:
    """The magic as a function of its own, whose documentation (`%memtriage?`) is the options' help."""

    def magic(*given: str) -> Any:
        __tracebackhide__ = True
        return method(*given)

    magic.__doc__ = parser.format_help()
    return magic


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


def cell_number(shell: Any) -> int:
    """The number of the cell that is running."""
    result = getattr(shell.displayhook, "exec_result", None)
    number: int | None = getattr(result, "execution_count", None)
    return number or int(shell.execution_count)


def run_body(shell: Any, cell: str) -> Any:
    """Run a cell's text in the user's namespace; the value of its last expression.

    Raises:
        SyntaxError: it has `await` outside of a function.
        BaseException: what the cell raises.
    """
    __tracebackhide__ = "__ipython_bottom__"  # IPython shows no frame above this one
    source = shell.transform_cell(cell)
    name = shell.compile.cache(source, cell_number(shell), raw_code=cell)
    tree = shell.transform_ast(shell.compile.ast_parse(source, filename=name))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(shell.compile(tree, name, "exec"), shell.user_global_ns, shell.user_ns)
    if last is None:
        return None
    return eval(shell.compile(ast.Expression(last.value), name, "eval"), shell.user_global_ns, shell.user_ns)


def awaits(shell: Any, cell: str) -> bool:
    """Whether a cell has `await`, `async for` or `async with` outside of a function."""
    return bool(shell.should_run_async(cell, transformed_cell=shell.transform_cell(cell)))
