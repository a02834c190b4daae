"""The line of the program that stores into a holder, found in the source.

The holder path names a container or a variable, and says in which function, class or module it is. The
statements of the program's own files that store under this name are collected: `append` and the like,
functions such as `heapq.heappush`, assignments to an item, an attribute or the variable, updates in place,
`setattr` and `register_buffer`. Another name that a function gives the container (`store = self.seen`) counts
as its own, and so does a call of a function that returns it. What only makes an empty container, or takes a
part of what is there, is left out. Only where one line is left is it told.

Known limitations: names that are passed on as arguments, and what is stored by libraries, are not found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from memtriage.model.paths import HolderPath, PathSegment, SegmentKind

_GROWS: Final = frozenset(
    ("append", "appendleft", "extend", "extendleft", "insert")
    + ("add", "update", "put", "put_nowait", "setdefault")
)
_FILLS: Final = frozenset(("heappush", "insort", "insort_left", "insort_right"))
"""Functions that add their second argument to the list that is their first."""
_SETS: Final = frozenset(("register_buffer", "register_parameter", "add_module", "register_module"))
_ADDS: Final = frozenset(("setattr", "register_parametrization"))
"""Functions and methods that store under a name that one of their first two arguments gives. Those of `_ADDS`
may keep what was there before."""
_THREADS: Final = frozenset(("Thread", "Timer"))
_CONSTRUCTORS: Final = frozenset(("__init__", "__new__", "__post_init__"))
_EMPTY: Final = frozenset(
    ("list", "dict", "set", "tuple", "deque", "defaultdict", "OrderedDict", "Counter", "Queue")
)
_SCOPES: Final = frozenset((SegmentKind.FRAME, SegmentKind.GENERATOR, SegmentKind.DEFAULT_ARGUMENT))
_CLOSURES: Final = frozenset((SegmentKind.CLOSURE, SegmentKind.HOOK_CLOSURE))
_NAMES: Final = frozenset(
    (SegmentKind.VARIABLE, SegmentKind.ATTRIBUTE, SegmentKind.HOOKS, SegmentKind.ITEM, SegmentKind.CONTEXT)
    + (SegmentKind.CONTEXT_VARIABLE,)
)
_VARIABLES: Final = frozenset((SegmentKind.VARIABLE, SegmentKind.CONTEXT_VARIABLE))
_LONGEST: Final = 60
"""Characters of a stored value that a sentence can show."""
_LARGEST: Final = 2_000_000
"""Bytes of source that are parsed."""


@dataclass(frozen=True, slots=True)
class Store:
    """A statement that stores.

    Attributes:
        filename, line: where it is.
        value: source of what it stores; None where it is long, or no single expression.
        itself: the value is made of what was stored before (`params = step(params)`).
        constructs: it gives a new object its attribute.
    """

    filename: str
    line: int
    value: str | None
    itself: bool = False
    constructs: bool = False


@dataclass(frozen=True, slots=True)
class _StoreTarget:
    """What a statement must store into.

    Attributes:
        segment: the last name of the holder path.
        before: the name before it; None where there is none.
        function: of whose variables it is one; None where it is no variable of a function.
        shared: other functions refer to the variable too.
        module: it is a variable of a module.
        inside: it is a container of a library, and what the path names is inside: only what adds counts.
        getters: functions of the file that return it.
        aliases: other names that the function around a statement gives it.
    """

    segment: PathSegment
    before: PathSegment | None
    function: str | None
    shared: bool
    module: bool
    inside: bool = False
    getters: frozenset[str] = frozenset()
    aliases: frozenset[str] = frozenset()


def storing_line(anchor: HolderPath, files: Sequence[str], allocated: str | None = None) -> Store | None:
    """Find the one statement that stores into the holder; None where there are none or several.

    Args:
        anchor: what the program itself holds, as the census has it.
        files: source files of the program in which the holder's function, class or module is.
        allocated: `file.py:line in function` where what is stored was made: decides between several.
    """
    if any(segment.kind is SegmentKind.LRU_CACHE for segment in anchor):
        return _definition(next(s.name for s in anchor if s.kind is SegmentKind.LRU_CACHE), files)
    # What keeps the variables of functions that have failed is what keeps the exception.
    kinds = [segment.kind for segment in anchor]
    if SegmentKind.TRACEBACK in kinds[1:]:
        anchor = anchor[: kinds.index(SegmentKind.TRACEBACK, 1)]
    files = list(dict.fromkeys(files))
    made: Store | None = None
    for holder in _containers(anchor, files):
        target = _target(holder)
        if target is None:
            continue
        target = replace(target, inside=len(holder) < len(_containing(anchor)))
        ranked = [store for file in files for store in _stores(file, target)]
        if _is_part_of_entry(holder):
            # A constructor makes the entry. What keeps it is the line that adds it.
            made = made or _only_one([one for one in ranked if one[1].constructs], allocated)
            ranked = [one for one in ranked if not one[1].constructs]
        if not ranked:
            continue
        if any(segment.kind is not SegmentKind.ITEM for segment in anchor[len(holder) :]):
            value = None if made is None else made.value
            ranked = [(rank, replace(store, value=value, itself=False)) for rank, store in ranked]
        return _only_one(ranked, allocated) or made
    return made


def _only_one(ranked: Sequence[tuple[int, Store]], allocated: str | None) -> Store | None:
    """Return the one statement of the lowest rank; of several, the one that allocates."""
    best = min((rank for rank, _ in ranked), default=0)
    left = {(store.filename, store.line): store for rank, store in ranked if rank == best}
    if len(left) > 1 and allocated is not None:
        at = allocated.partition(" in ")[0]
        left = {key: one for key, one in left.items() if f"{key[0]}:{key[1]}".endswith(at)} or left
    return next(iter(left.values())) if len(left) == 1 else None


def pack_hook(files: Sequence[str]) -> Store | None:
    """Find the one `saved_tensors_hooks(pack, unpack)` of the program; its value is `pack`."""
    hooks = [
        Store(file, node.lineno, _source(node.args[0]))
        for file in dict.fromkeys(files)
        if (tree := _parsed(file)) is not None
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _name(node.func) == "saved_tensors_hooks" and node.args
    ]
    return hooks[0] if len(hooks) == 1 else None


def making_line(anchor: HolderPath, files: Sequence[str]) -> Store | None:
    """Find the one call of the program that makes what a library keeps; None where there are none or several.

    That is a thread, or an object of the class that keeps something of each of its objects.

    Args:
        anchor: as for `storing_line`.
        files: source files of the program.
    """
    root = anchor[0]
    if root.kind is SegmentKind.THREAD:
        names = _THREADS
    elif root.kind is SegmentKind.CLASS:
        names = frozenset({root.name.rpartition(".")[2]})
    else:
        return None
    calls = [
        Store(file, node.lineno, None)
        for file in dict.fromkeys(files)
        if (tree := _parsed(file)) is not None
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _name(node.func) in names
    ]
    return calls[0] if len(calls) == 1 else None


def forget_sources() -> None:
    """Drop the parsed sources, which take many times the size of the files."""
    _parsed.cache_clear()


def _definition(function: str, files: Sequence[str]) -> Store | None:
    """The `def` of a cached function."""
    name = function.rpartition(".")[2]
    definitions = [
        Store(file, node.lineno, None)
        for file in dict.fromkeys(files)
        if (tree := _parsed(file)) is not None
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name
    ]
    return definitions[0] if len(definitions) == 1 else None


def _containers(anchor: HolderPath, files: Sequence[str]) -> Iterator[HolderPath]:
    """The path, and those of the containers that its last items are in: a key need not be in the source.

    What an entry is made of need not be, either: of `players[*].weight` a library stores `weight`, and the
    program the player. The same goes for a container of a library, such as `cache.data` of a weak dictionary.
    """
    outermost = _containing(anchor)
    yield from (anchor[:end] for end in range(len(anchor), len(outermost) - 1, -1))
    while outermost[-1].kind is SegmentKind.ATTRIBUTE and len(outermost) > 1:
        if any(_mentions(file, outermost[-1].name) for file in files):
            return
        outermost = outermost[:-1]
        yield outermost


def _containing(anchor: HolderPath) -> HolderPath:
    """The path to the outermost container whose entries vary."""
    while anchor[-1].kind is SegmentKind.ITEM or any(map(_varies, anchor)):
        anchor = anchor[:-1]
    return anchor


def _varies(segment: PathSegment) -> bool:
    return segment.kind is SegmentKind.ITEM and "*" in segment.name


def _is_part_of_entry(holder: HolderPath) -> bool:
    """Whether the last name of a path is of a part of what a container gets more of."""
    named = max((at for at, segment in enumerate(holder) if not _varies(segment)), default=0)
    return any(map(_varies, holder[:named]))


def _mentions(filename: str, attribute: str) -> bool:
    """Whether a source file has an attribute of this name."""
    tree = _parsed(filename)
    nodes = () if tree is None else ast.walk(tree)
    return any(isinstance(node, ast.Attribute) and node.attr == attribute for node in nodes)


def _target(anchor: HolderPath) -> _StoreTarget | None:
    named = [at for at, s in enumerate(anchor) if s.kind in _NAMES and s.name and s.name != "*"]
    if not named or any(anchor[at].kind not in _NAMES for at in range(named[-1], len(anchor))):
        return None
    segment = anchor[named[-1]]
    before = anchor[named[-2]] if len(named) > 1 else None
    if segment.kind is SegmentKind.CONTEXT_VARIABLE:
        return _StoreTarget(segment, None, None, True, True)
    if segment.kind is not SegmentKind.VARIABLE:
        return _StoreTarget(segment, before, None, True, False)
    scope = anchor[named[-1] - 1] if named[-1] else None
    if scope is None or scope.kind is SegmentKind.MODULE:
        return _StoreTarget(segment, None, None, True, True)
    if scope.kind in _SCOPES or scope.kind in _CLOSURES:
        function = scope.name.rpartition(".")[2]
        return _StoreTarget(segment, None, function, scope.kind in _CLOSURES, False)
    return None


@lru_cache(maxsize=16)
def _parsed(filename: str) -> ast.Module | None:
    try:
        source = Path(filename).read_bytes()
        return ast.parse(source) if len(source) <= _LARGEST else None
    except (OSError, SyntaxError, ValueError):
        return None


def _stores(filename: str, target: _StoreTarget) -> Iterator[tuple[int, Store]]:
    """(0 for what adds or 1 for what replaces, the statement) of each that stores into the target."""
    tree = _parsed(filename)
    if tree is None:
        return
    target = replace(target, getters=frozenset(_getters(tree, target)))
    aliases: dict[ast.AST, frozenset[str]] = {}
    for functions, node in _with_functions(tree, ()):
        if not _in_scope(functions, target):
            continue
        around = functions[-1] if functions else tree
        if around not in aliases:
            aliases[around] = frozenset(_aliases(around, target))
        for rank, value in _stored_by(node, replace(target, aliases=aliases[around])):
            if isinstance(value, ast.Subscript) and _matches(value.value, target):
                continue  # a part of what is there
            itself = value is not None and _carries(value, target, around)
            line = getattr(node, "lineno", 0)
            itself = itself and not _begins_anew(tree, line, target)
            constructs = getattr(around, "name", None) in _CONSTRUCTORS
            yield (0 if itself else rank), Store(filename, line, _source(value), itself, constructs)


def _getters(tree: ast.AST, target: _StoreTarget) -> Iterator[str]:
    """Yield the names of functions that return the target, and nothing else."""
    for functions, node in _with_functions(tree, ()):
        if isinstance(node, ast.FunctionDef) and _in_scope((*functions, node), target):
            returned = [each.value for each in _own_nodes(node) if isinstance(each, ast.Return)]
            if returned and all(_matches(value, target) for value in returned):
                yield node.name


def _aliases(function: ast.AST, target: _StoreTarget) -> Iterator[str]:
    """Yield other names that a function gives the target, or what `setdefault` returns of it."""
    for node in _own_nodes(function):
        if isinstance(node, ast.Assign) and (
            _matches(node.value, target) or (_is_default(node.value) and _holds_in(node.value, target))
        ):
            yield from (part.id for part in node.targets if isinstance(part, ast.Name))


def _carries(value: ast.AST, target: _StoreTarget, function: ast.AST) -> bool:
    """Whether a value is made of the target: of an attribute also by way of variables of the function.

    Variables are not followed to a variable: a loss depends on the loss before, by way of the gradients.
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


def _begins_anew(tree: ast.AST, line: int, target: _StoreTarget) -> bool:
    """Whether the loop around a line gives the target a value of its own in each iteration."""
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


def _in_scope(functions: tuple[_Function, ...], target: _StoreTarget) -> bool:
    """Whether the target's variable goes by its name there."""
    if target.segment.kind not in _VARIABLES:
        return True
    name = target.segment.name
    names = [getattr(function, "name", "<lambda>") for function in functions]
    if target.module:
        return not any(_binds(function, name) for function in functions)
    if target.function is None:
        return False
    if target.function in names:
        inner = functions[names.index(target.function) + 1 :]
        return not any(_binds(function, name) for function in inner)
    # A variable of the function around the one that the path names.
    return target.shared and bool(functions) and _binds(functions[-1], name)


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


def _stored_by(node: ast.AST, target: _StoreTarget) -> Iterator[tuple[int, ast.expr | None]]:
    """(0 for what adds or 1 for what replaces, the value) for each store into the target by a node."""
    if isinstance(node, ast.Call):
        yield from _stored_by_call(node, target)
    elif isinstance(node, ast.AugAssign) and not target.inside:
        if _matches(node.target, target) or _holds_in(node.target, target):
            yield 0, node.value
    elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for each in (part for destination in targets for part in _parts(destination)):
            if _matches(each, target):
                if not (target.inside or _is_empty(node.value)):
                    yield 1, node.value
            elif isinstance(each, ast.Subscript) and _holds_in(each, target):
                yield 0, node.value


def _stored_by_call(node: ast.Call, target: _StoreTarget) -> Iterator[tuple[int, ast.expr | None]]:
    name, values = _name(node.func), node.args
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


def _matches(node: ast.AST | None, target: _StoreTarget) -> bool:
    """Whether an expression goes by the target's name."""
    segment = target.segment
    if isinstance(node, ast.Call) and _name(node.func) in target.getters:
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


def _holds_in(node: ast.expr, target: _StoreTarget) -> bool:
    """Whether an expression is the target under another name, or a container inside it."""
    container = _container(node)
    is_alias = isinstance(container, ast.Name) and container.id in target.aliases
    return is_alias or (container is not node and _matches(container, target))


def _is_default(value: ast.expr) -> bool:
    """Whether a value is `x.setdefault(key, ...)`."""
    return isinstance(value, ast.Call) and _name(value.func) == "setdefault"


def _is_empty(value: ast.expr) -> bool:
    """Whether a value is a constant or a container without entries."""
    if isinstance(value, ast.Constant):
        return True
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return not value.elts
    if isinstance(value, ast.Dict):
        return all(_is_empty(entry) for entry in value.values)
    return isinstance(value, ast.Call) and _name(value.func) in _EMPTY and not any(map(_holds, value.args))


def _holds(value: ast.expr) -> bool:
    return not isinstance(value, (ast.Name, ast.Lambda)) and not _is_empty(value)


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _text(value: ast.expr) -> str | None:
    """A string's text, with numbers and what an f-string puts in as `*`."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.JoinedStr):
        parts = (str(p.value) if isinstance(p, ast.Constant) else "*" for p in value.values)
        return re.sub(r"[\d*]+", "*", "".join(parts))
    return None


def _source(value: ast.expr | None) -> str | None:
    if value is None:
        return None
    text = ast.unparse(value)
    return text if len(text) <= _LONGEST and "\n" not in text else None
