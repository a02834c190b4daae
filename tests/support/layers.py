"""The road through `src/memtriage`, and what the imports say of it.

`python tests/support/layers.py` draws the picture in docs/architecture.md again.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = ROOT / "src" / "memtriage"
PAGE: Final = ROOT / "docs" / "architecture.md"

ROAD: Final = (
    ("model",),
    ("process", "playbook"),
    ("store", "observe"),
    ("allocator",),
    ("catalogue",),
    ("account", "machine"),
    ("outside",),
    ("messages",),
    ("diagnose",),
    ("snapshots", "prediction"),
    ("planning", "difference"),
    ("treat",),
    ("prove",),
    ("report",),
    ("session",),
    ("integrations",),
    ("cli",),
)
"""Folders in the order of the road: each imports only from those in rows before its own."""
LEVEL: Final = {folder: level for level, row in enumerate(ROAD) for folder in row}
FOLDERS: Final = tuple(folder for row in ROAD for folder in row)


@cache
def modules() -> dict[str, Path]:
    """Every module by its name below the package, such as `diagnose.judge`; a package by its folder's."""
    paths = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


@cache
def imports() -> dict[str, frozenset[str]]:
    """What each module imports of the package: also inside functions, and for type checking only."""
    return {name: frozenset(_imports(path) - {name}) for name, path in modules().items()}


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.add(whole if whole.removeprefix("memtriage.") in modules() else str(node.module))
    own = {name for name in names if name == "memtriage" or name.startswith("memtriage.")}
    return {name.removeprefix("memtriage").removeprefix(".") for name in own}


def folder_of(module: str) -> str:
    """The folder of the road that a module is in; its own name for the files beside the folders."""
    return module.partition(".")[0]


def arrows_up() -> list[str]:
    """Imports against the road, as `from -> to`."""
    return [
        f"{module} -> {other or 'memtriage'}"
        for module, others in imports().items()
        if folder_of(module) in LEVEL
        for other in others
        if folder_of(other) != folder_of(module)
        and LEVEL.get(folder_of(other), len(ROAD)) >= LEVEL[folder_of(module)]
    ]


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (strongly connected components of more than one node)."""
    order: list[str] = []
    seen: set[str] = set()
    for start in graph:
        stack = [(start, iter(graph[start]))] if start not in seen else []
        seen.add(start)
        while stack:
            node, rest = stack[-1]
            following = next((other for other in rest if other not in seen), None)
            if following is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(graph.get(following, ()))))
    back: defaultdict[str, list[str]] = defaultdict(list)
    for node, others in graph.items():
        for other in others:
            back[other].append(node)
    groups: list[list[str]] = []
    taken: set[str] = set()
    for start in reversed(order):
        group, waiting = [], [start]
        while waiting:
            node = waiting.pop()
            if node not in taken:
                taken.add(node)
                group.append(node)
                waiting += back[node]
        if len(group) > 1:
            groups.append(sorted(group))
    return groups


def folder_graph(inside: str) -> dict[str, set[str]]:
    """How the folders directly inside a folder import each other (`""`: the whole package)."""
    prefix = f"{inside}." if inside else ""
    below = {
        name.removeprefix(prefix).partition(".")[0]
        for name, path in modules().items()
        if name.startswith(prefix) and name != inside and path.name == "__init__.py"
    } - {""}
    graph: dict[str, set[str]] = {folder: set() for folder in below}
    for module, others in imports().items():
        own = module.removeprefix(prefix).partition(".")[0] if module.startswith(prefix) else ""
        for other in others:
            their = other.removeprefix(prefix).partition(".")[0] if other.startswith(prefix) else ""
            if own in below and their in below and own != their:
                graph[own].add(their)
    return graph


def picture() -> str:
    """The folders in the order of the road, with a dot for each folder that one imports from."""
    graph = folder_graph("")
    width = max(map(len, FOLDERS)) + 4
    head = " " * width + " ".join(f"{number:2}" for number in range(1, len(FOLDERS) + 1))
    lines = [head]
    for number, folder in enumerate(FOLDERS, 1):
        cells = [
            " ■" if other == folder else " ●" if other in graph[folder] else " ·"
            for other in FOLDERS[:number]
        ]
        lines.append(f"{number:2} {folder:<{width - 3}}" + " ".join(cells))
    return "\n".join(line.rstrip() for line in lines)


_PICTURE: Final = re.compile(r"(<!-- picture of the imports[^\n]*-->\n+```text\n)(.*?)(```)", re.DOTALL)


def picture_on_the_page() -> str:
    """The picture as docs/architecture.md has it."""
    match = _PICTURE.search(PAGE.read_text(encoding="utf-8"))
    assert match is not None, f"{PAGE} has no picture of the imports"
    return match.group(2).rstrip("\n")


def draw() -> None:
    """Put the picture of the imports as they are into docs/architecture.md."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        _PICTURE.sub(lambda match: f"{match.group(1)}{picture()}\n{match.group(3)}", text), encoding="utf-8"
    )


if __name__ == "__main__":
    draw()
