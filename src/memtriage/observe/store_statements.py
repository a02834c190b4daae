"""Statements of a source file that store under a name.

These are `append` and the like, functions such as `heapq.heappush`, assignments to an item, an attribute or
the variable, updates in place, `setattr` and `register_buffer`. If a function gives the container another
name (`store = self.seen`), that name counts, too, as does a call of a function that returns the container.
Statements that only make an empty container, or take a part of its contents, are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from memtriage.model.paths import PathSegment, SegmentKind
from memtriage.observe.source_files import parse_file, words_of

_GROWS: Final = frozenset(
    ("append", "appendleft", "extend", "extendleft", "insert")
    + ("add", "update", "put", "put_nowait", "setdefault")
)
_FILLS: Final = frozenset(("heappush", "insort", "insort_left", "insort_right"))
"""Functions that add their second argument to their first, a list."""
_SETS: Final = frozenset(("register_buffer", "register_parameter", "add_module", "register_module"))
_ADDS: Final = frozenset(("setattr", "register_parametrization"))
"""Functions and methods that store under a name in one of their first two arguments. Those of `_ADDS` may
keep the previous value."""
_CONSTRUCTORS: Final = frozenset(("__init__", "__new__", "__post_init__"))
_EMPTY: Final = frozenset(
    ("list", "dict", "set", "tuple", "deque", "defaultdict", "OrderedDict", "Counter", "Queue")
)
_MAKES: Final = (ast.ListComp, ast.SetComp, ast.DictComp)
"""Expressions that make a container with its entries."""
_VARIABLES: Final = frozenset((SegmentKind.VARIABLE, SegmentKind.CONTEXT_VARIABLE))
_LONGEST: Final = 60
"""Most characters of a stored value that is shown in a sentence."""


@dataclass(frozen=True, slots=True)
class Store:
    """A statement that stores.

    Attributes:
        filename, line: where it is.
        value: source of what it stores; None if it is long, or not a single expression.
        itself: the value is computed from the previous one (`params = step(params)`).
        constructs: it sets an attribute of a new object.
        depth: number of segments of the holder path that it stores into; 0 if it was not searched by path.
    """

    filename: str
    line: int
    value: str | None
    itself: bool = False
    constructs: bool = False
    depth: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class StoreTarget:
    """What a statement must store into.

    Attributes:
        segment: the last name of the holder path.
        before: the name before it; None if there is none.
        function: the function whose variable it is; None if it is not a function's variable.
        shared: other functions refer to the variable, too.
        module: it is a variable of a module.
        inside: the path names something inside a library's container, or a container within entries: only
            what adds counts, or makes it with its entries.
        getters: functions of the file that return it.
        aliases: other names for it in the function around a statement.
    """

    segment: PathSegment
    before: PathSegment | None
    function: str | None
    shared: bool
    module: bool
    inside: bool = False
    getters: frozenset[str] = frozenset()
    aliases: frozenset[str] = frozenset()


parsed = lru_cache(maxsize=16)(parse_file)
words = lru_cache(maxsize=256)(words_of)
_NAMED: Final = frozenset((SegmentKind.VARIABLE, SegmentKind.ATTRIBUTE, SegmentKind.CONTEXT_VARIABLE))


def may_name(filename: str, segment: PathSegment) -> bool:
    """Whether a source file may have a name: parsing and searching a large file takes seconds."""
    name = segment.name
    return segment.kind not in _NAMED or not name.isidentifier() or name in words(filename)


def stores_into(filename: str, target: StoreTarget) -> Iterator[tuple[int, Store]]:
    """Each statement that stores into the target, after 0 if it adds or 1 if it replaces."""
    tree = parsed(filename) if may_name(filename, target.segment) else None
    if tree is None:
        return
    target = replace(target, getters=frozenset(_getters(tree, target)))
    targets: dict[ast.AST, StoreTarget] = {}
    scopes: dict[tuple[_Function, ...], bool] = {}
    for functions, node in _with_functions(tree, ()):
        if functions not in scopes:  # of each function once: this walks through it
            scopes[functions] = _in_scope(functions, target)
        if not scopes[functions]:
            continue
        around = functions[-1] if functions else tree
        if around not in targets:
            targets[around] = replace(target, aliases=frozenset(_aliases(around, target)))
        for rank, value in _stored_by(node, targets[around]):
            if isinstance(value, ast.Subscript) and _matches(value.value, target):
                continue  # a part of the present contents
            itself = value is not None and _carries(value, target, around)
            line = getattr(node, "lineno", 0)
            itself = itself and not _begins_anew(tree, line, target)
            constructs = getattr(around, "name", None) in _CONSTRUCTORS
            yield (0 if itself else rank), Store(filename, line, short_source(value), itself, constructs)


def _getters(tree: ast.AST, target: StoreTarget) -> Iterator[str]:
    """Yield the names of functions that return the target, and nothing else."""
    for functions, node in _with_functions(tree, ()):
        if isinstance(node, ast.FunctionDef) and _in_scope((*functions, node), target):
            returned = [each.value for each in _own_nodes(node) if isinstance(each, ast.Return)]
            if returned and all(_matches(value, target) for value in returned):
                yield node.name


def _aliases(function: ast.AST, target: StoreTarget) -> Iterator[str]:
    """Yield other names that a function gives the target, or a result of its `setdefault`."""
    for node in _own_nodes(function):
        if isinstance(node, ast.Assign) and (
            _matches(node.value, target) or (_is_default(node.value) and _holds_in(node.value, target))
        ):
            yield from (part.id for part in node.targets if isinstance(part, ast.Name))


def _carries(value: ast.AST, target: StoreTarget, function: ast.AST) -> bool:
    """Whether a value is computed from the target; for an attribute, also through variables of the function.

    For a variable, other variables are not followed: a loss depends on the previous loss through the
    gradients.
    """
    if any(_matches(each, target) for each in ast.walk(value)):
        return True
    if target.segment.kind in _VARIABLES:
        return False
    made = [node for node in _own_nodes(function) if isinstance(node, ast.Assign)]
    names, followed = _names(value), set[str]()
    while names:
        name = names.pop()
        followed.add(name)
        for node in made:
            assigned = (part for destination in node.targets for part in _parts(destination))
            if any(isinstance(part, ast.Name) and part.id == name for part in assigned):
                if any(_matches(each, target) for each in ast.walk(node.value)):
                    return True
                names |= _names(node.value) - followed
    return False


def _names(value: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}


def _begins_anew(tree: ast.AST, line: int, target: StoreTarget) -> bool:
    """Whether the loop around a line gives the target a new value in each iteration."""
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While))
        and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
    ]
    if not loops:
        return False
    loop = max(loops, key=lambda node: node.lineno)
    if not isinstance(loop, ast.While) and any(_matches(part, target) for part in _parts(loop.target)):
        return True
    return any(
        any(_matches(part, target) for destination in node.targets for part in _parts(destination))
        and not any(_matches(each, target) for each in ast.walk(node.value))
        for statement in loop.body
        for node in [statement, *_own_nodes(statement)]
        if isinstance(node, ast.Assign) and node.lineno < line
    )


_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _with_functions(
    node: ast.AST, functions: tuple[_Function, ...]
) -> Iterator[tuple[tuple[_Function, ...], ast.AST]]:
    """Every node below one, with the functions around it, outermost first."""
    for child in ast.iter_child_nodes(node):
        yield functions, child
        inside = (*functions, child) if isinstance(child, _Function) else functions
        yield from _with_functions(child, inside)


def _in_scope(functions: tuple[_Function, ...], target: StoreTarget) -> bool:
    """Whether the name means the target's variable there."""
    if target.segment.kind not in _VARIABLES:
        return True
    name = target.segment.name
    names = list(map(_name_of, functions))
    if target.module:
        return not any(_binds(function, name) for function in functions)
    if target.function is None:
        return False
    if target.function in names:
        inner = functions[names.index(target.function) + 1 :]
        return not any(_binds(function, name) for function in inner)
    # A variable of an outer function of the one that the path names, which other inner functions use, too.
    binder = next((function for function in reversed(functions) if _binds(function, name)), None)
    return target.shared and binder is not None and target.function in map(_name_of, ast.walk(binder))


def _name_of(node: ast.AST) -> str | None:
    """Return the name of a function; None for anything else."""
    if isinstance(node, ast.Lambda):
        return "<lambda>"
    return node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None


def _binds(function: _Function, name: str) -> bool:
    """Whether a name is a variable of the function itself."""
    arguments = function.args
    parameters = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    if any(argument is not None and argument.arg == name for argument in parameters):
        return True
    if isinstance(function, ast.Lambda):
        return False
    bound = False
    for node in _own_nodes(function):
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            return False
        bound = bound or (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
    return bound


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, _Function):
            yield child
            yield from _own_nodes(child)


def _stored_by(node: ast.AST, target: StoreTarget) -> Iterator[tuple[int, ast.expr | None]]:
    """The value of each store into the target by a node, after 0 if it adds or 1 if it replaces."""
    if isinstance(node, ast.Call):
        yield from _stored_by_call(node, target)
    elif isinstance(node, ast.AugAssign) and not target.inside:
        if _matches(node.target, target) or _holds_in(node.target, target):
            yield 0, node.value
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for each in (part for destination in targets for part in _parts(destination)):
            if _matches(each, target):
                if not _is_empty(node.value) and (not target.inside or isinstance(node.value, _MAKES)):
                    yield 1, node.value
            elif isinstance(each, ast.Subscript) and _holds_in(each, target):
                yield 0, node.value


def _stored_by_call(node: ast.Call, target: StoreTarget) -> Iterator[tuple[int, ast.expr | None]]:
    name, values = called(node.func), node.args
    if isinstance(node.func, ast.Attribute):
        held = node.func.value
        if name in _GROWS and values and (_matches(held, target) or _holds_in(held, target)):
            if name != "setdefault" or not _is_empty(values[-1]):
                yield 0, values[-1]
        elif name.endswith("_") and not (name.endswith("__") or target.inside) and _matches(held, target):
            yield 0, None
    if name in _FILLS and len(values) > 1 and (_matches(values[0], target) or _holds_in(values[0], target)):
        yield 0, values[1]
    registers = name in _SETS | _ADDS and target.segment.kind is SegmentKind.ATTRIBUTE and len(values) > 1
    if registers and any(_text(value) == target.segment.name for value in values[:2]):
        yield (0 if "*" in target.segment.name or name in _ADDS else 1), values[-1]


def _parts(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for elt in target.elts:
            yield from _parts(elt)
    else:
        yield target.value if isinstance(target, ast.Starred) else target


def _matches(node: ast.AST | None, target: StoreTarget) -> bool:
    """Whether an expression is the target's name."""
    segment = target.segment
    if isinstance(node, ast.Call) and called(node.func) in target.getters:
        return True
    if segment.kind in _VARIABLES:
        return isinstance(node, ast.Name) and node.id == segment.name
    if segment.kind is SegmentKind.ITEM:
        return isinstance(node, ast.Subscript) and _is_key(node.slice, segment.name)
    return isinstance(node, ast.Attribute) and node.attr == segment.name


def _is_key(key: ast.expr, name: str) -> bool:
    return isinstance(key, ast.Constant) and repr(key.value) == name


def _container(node: ast.expr) -> ast.expr:
    """`x` of `x[key]`, `x[a][b]` and `x.setdefault(key, [])`."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("setdefault", "get")
        ):
            node = node.func.value
        else:
            return node


def _holds_in(node: ast.expr, target: StoreTarget) -> bool:
    """Whether an expression is the target under another name, or a container inside it."""
    container = _container(node)
    is_alias = isinstance(container, ast.Name) and container.id in target.aliases
    return is_alias or (container is not node and _matches(container, target))


def _is_default(value: ast.expr) -> bool:
    """Whether a value is `x.setdefault(key, ...)`."""
    return isinstance(value, ast.Call) and called(value.func) == "setdefault"


def _is_empty(value: ast.expr) -> bool:
    """Whether a value is a constant or a container without entries."""
    if isinstance(value, ast.Constant):
        return True
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return not value.elts
    if isinstance(value, ast.Dict):
        return all(_is_empty(entry) for entry in value.values)
    return isinstance(value, ast.Call) and called(value.func) in _EMPTY and not any(map(_holds, value.args))


def _holds(value: ast.expr) -> bool:
    return not isinstance(value, (ast.Name, ast.Lambda)) and not _is_empty(value)


def called(function: ast.AST) -> str:
    """Return the name of a function or method; "" if it has none."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _text(value: ast.expr) -> str | None:
    """A string's text, with numbers and the values of an f-string as `*`."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.JoinedStr):
        parts = (str(p.value) if isinstance(p, ast.Constant) else "*" for p in value.values)
        return re.sub(r"[\d*]+", "*", "".join(parts))
    return None


def short_source(value: ast.expr | None) -> str | None:
    """Return the source of an expression if it is short enough for a sentence."""
    if value is None:
        return None
    text = ast.unparse(value)
    return text if len(text) <= _LONGEST and "\n" not in text else None
