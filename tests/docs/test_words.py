"""The worst patterns of a translated text are in no page: what to write instead is next to each."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import documents
from support.words import IN_THE_SOURCE, REJECTED

SOURCE = documents.ROOT / "src" / "memtriage"


def _prose(page: str) -> list[tuple[int, str]]:
    """The lines of a page outside blocks of code, without code in them."""
    lines, fenced = [], False
    for number, line in enumerate((documents.ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced:
            lines.append((number, re.sub(r"`[^`]*`", "", line)))
    return lines


@pytest.mark.parametrize("page", [documents.name(page) for page in documents.pages()])
def test_pages_are_in_plain_words(page: str) -> None:
    found = [
        f"{page}:{number}: {match[0]!r}: {better}"
        for number, line in _prose(page)
        for pattern, better in REJECTED.items()
        if (match := re.search(pattern, line))
    ]
    assert not found, "\n".join(found)


OURS = {
    "census": r"\bcensus(?:es)?\b",
    "ledger": r"\bledgers?\b",
    "stranded": r"\bstrand(?:s|ed)?\b",
    "holder": r"\bholders?\b",
    "mark": r"(?<!high-water )\bmarks?\b",
    "releasable": r"\breleasable\b",
    "residue": r"\bresidue\b",
    "detection limit": r"\bdetection limit\b",
}
"""Words that PyTorch does not have."""


def _unexplained(page: Path, pattern: str) -> str | None:
    """Where a page first has a word, if it neither links nor defines (in italics) it there."""
    before = ""
    for token in documents.tokens(page):
        within = 0
        for child in token.children or () if before != "heading_open" else ():
            within += child.nesting if child.type.startswith(("link", "em")) else 0
            if child.type == "text" and re.search(pattern, child.content):
                return None if within else child.content
        before = token.type
    return None


@pytest.mark.parametrize("word", OURS)
@pytest.mark.parametrize("page", sorted((documents.ROOT / "docs").glob("*.md")), ids=documents.name)
def test_a_page_links_a_word_of_ours_where_it_first_uses_it(page: Path, word: str) -> None:
    glossary = (documents.ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert f"| {word} |" in glossary
    if page.name != "glossary.md":
        assert _unexplained(page, OURS[word]) is None, f"link {word!r} to glossary.md"


def _printed(path: Path) -> Iterator[tuple[int, str]]:
    """The texts with spaces in a source file, without docstrings: what programs may print."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        if isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces = (part.value if isinstance(part, ast.Constant) else "3 GiB" for part in node.values)
            yield node.lineno, "".join(map(str, pieces))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value if " " in node.value else ""


@pytest.mark.parametrize("folder", sorted(path.name for path in SOURCE.iterdir() if path.is_dir()))
def test_what_is_printed_is_in_plain_words(folder: str) -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {match[0]!r}: {better}"
        for path in sorted((SOURCE / folder).rglob("*.py"))
        for number, text in _printed(path)
        for pattern, better in REJECTED.items()
        if (match := re.search(pattern, text))
    ]
    assert not found, "\n".join(found)


def _explained(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a source file's docstrings and comments."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from enumerate(str(node.value.value).splitlines(), node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("folder", sorted(path.name for path in SOURCE.iterdir() if path.is_dir()))
def test_docstrings_and_comments_are_in_plain_words(folder: str) -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {match[0]!r}: {REJECTED[pattern]}"
        for path in sorted((SOURCE / folder).rglob("*.py"))
        for number, line in _explained(path)
        for pattern in IN_THE_SOURCE
        if (match := re.search(pattern, line))
    ]
    assert not found, "\n".join(found)
