"""Running the body of a cell below another magic, where IPython hands it over as text."""

from __future__ import annotations

import ast
from typing import Any


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
