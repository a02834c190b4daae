"""Holder paths are data: only `report/` may look at the words of one.

A rule that reads words dies silently when they are reworded. Rules match the segments of
`memtriage.model.paths`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "memtriage"
WORDING = {
    "model/paths.py",  # makes the words
    "integrations/notebook/words.py",  # renames variables in sentences that the watch has made
}
PRINTED = {
    "holder", "also_held_by", "still_held_by", "mechanism", "evidence", "named", "in_words", "last_name",
}  # fmt: skip
"""Attributes and functions that give words with a holder path in them."""
LOOKS = {
    "startswith", "endswith", "removeprefix", "removesuffix", "split", "rsplit", "partition", "rpartition",
    "find", "rfind", "index", "count", "replace", "strip", "lstrip", "rstrip", "isidentifier",
}  # fmt: skip
MATCHES = {"match", "search", "fullmatch", "findall", "finditer", "sub", "subn"}


def gives_words(node: ast.AST) -> bool:
    """Whether an expression is words with a holder path in it, or a collection of such."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in PRINTED
    if isinstance(node, ast.BoolOp):
        return any(map(gives_words, node.values))
    if isinstance(node, ast.Subscript):
        return gives_words(node.value)
    return isinstance(node, ast.Attribute) and node.attr in PRINTED


def words_bound(tree: ast.AST) -> set[str]:
    """Names that stand for such words: assigned from them, or that a loop takes from them."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and gives_words(node.value):
            bound |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.For | ast.comprehension) and gives_words(node.iter):
            bound |= {node.target.id} if isinstance(node.target, ast.Name) else set()
    return bound


def looks_at_words(source: str) -> list[int]:
    """Lines that look into the words of a path instead of printing them."""
    tree = ast.parse(source)
    bound = words_bound(tree)

    def is_words(node: ast.AST) -> bool:
        return gives_words(node) or (isinstance(node, ast.Name) and node.id in bound)

    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            looks = node.func.attr in LOOKS and is_words(node.func.value)
            if looks or (node.func.attr in MATCHES and any(map(is_words, node.args))):
                lines.append(node.lineno)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            pairs = zip(node.ops, node.comparators, strict=True)
            inside = any(isinstance(op, ast.In | ast.NotIn) and is_words(other) for op, other in pairs)
            equal = any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops) and any(map(is_words, sides))
            if inside or (equal and any(isinstance(side, ast.Constant) for side in sides)):
                lines.append(node.lineno)
        elif isinstance(node, ast.Subscript) and is_words(node.value) and isinstance(node.slice, ast.Slice):
            lines.append(node.lineno)
    return lines


MODULES = sorted(
    file for file in SOURCE.rglob("*.py")
    if file.relative_to(SOURCE).parts[0] != "report" and str(file.relative_to(SOURCE)) not in WORDING
)  # fmt: skip


def test_no_rule_outside_report_looks_at_a_printed_holder_path() -> None:
    assert len(MODULES) > 200
    lines = [
        f"{file.relative_to(SOURCE)}:{line}" for file in MODULES for line in looks_at_words(file.read_text())
    ]
    assert lines == []


@pytest.mark.parametrize(
    "rule",
    [
        "growth.holder.startswith('C++')",
        "'closure of hook' in group.holder",
        "in_words(anchor).removesuffix('[*]')",
        "re.search(r'ctx', finding.holder)",
        "finding.holder == 'C++ only'",
        "any(line.startswith('at this rate') for line in finding.evidence)",
        "[one for one in finding.also_held_by if one.startswith('Out[')]",
        "text = finding.holder or ''\nif 'distributed' in text: pass",
        "held.holder[:3]",
    ],
)
def test_what_looks_at_words_is_seen(rule: str) -> None:
    assert looks_at_words(rule)


@pytest.mark.parametrize(
    "use",
    [
        "say(f'grows: {finding.holder}')",
        "has(group.anchor, SegmentKind.HOOKS)",
        "known = (finding.device, finding.held_at)",
        "', '.join(finding.also_held_by)",
    ],
)
def test_printing_is_allowed(use: str) -> None:
    assert looks_at_words(use) == []
