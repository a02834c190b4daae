"""Reads the documentation: command lines, usage lines, blocks of code, options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT: Final = Path(__file__).parents[2]
SHELL: Final = ("sh", "bash", "shell", "console")
_PROGRAM: Final = re.compile(
    r"(?:[A-Z_]+=\S+ )*"  # settings for this command alone
    r"(?:memtriage|torchrun|accelerate launch|pip|uv|make|git|kubectl|ray|curl|docker|tensorboard|mlflow"
    r"|(?:python3?|pytest|deepspeed)(?= -| \S+\.py))(?: .*)?"
)
"""Begins a command line outside blocks for the shell."""

_PLACEHOLDER: Final = re.compile(r"\[|…|\.\.\.|\b[A-Z]{3,}\b")
_COMMENT: Final = re.compile(r"(?:^|\s+)# .*$", re.MULTILINE)


def pages() -> list[Path]:
    """Every page that people read: README, docs, examples, cases, how to contribute."""
    patterns = ("README.md", "CONTRIBUTING.md", "docs/*.md", "examples/README.md", "cases/**/README.md")
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def name(path: Path) -> str:
    """The name of a page in reports of tests."""
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code.

    Attributes:
        page: the page, relative to the repository.
        line: of its first line.
        language: what the fence says; "" for none, and for an indented block.
        text: what is in it.
    """

    page: str
    line: int
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command line.

    Attributes:
        page: the page, relative to the repository.
        line: where it begins.
        text: as it is typed, without prompt and comment; of several lines if it is long.
        shown: lines that the page shows as its output; none if it shows nothing.
    """

    page: str
    line: int
    text: str
    shown: tuple[str, ...] = field(default=())

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.text.split())}"


def blocks(path: Path) -> list[Block]:
    """All blocks of code of a page."""
    return [
        Block(name(path), _first_line(token), token.info.split()[0] if token.info else "", token.content)
        for token in tokens(path)
        if token.type in ("fence", "code_block")
    ]


def _first_line(token: Token) -> int:
    assert token.map is not None
    return token.map[0] + (2 if token.type == "fence" else 1)


@cache
def tokens(path: Path) -> list[Token]:
    """A page as its parser sees it."""
    return MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))


def code_spans(path: Path) -> Iterator[tuple[int, str]]:
    """Code within the text of a page: its line (that of the paragraph) and what it says."""
    for token in tokens(path):
        for child in token.children or ():
            if child.type == "code_inline":
                yield (token.map or [0])[0] + 1, child.content


def commands(path: Path) -> list[Command]:
    """Every command line of a page.

    In a block for the shell these are all lines; of `console` those after a prompt, as others are output.
    In a block without a language, or of plain text, these are the lines after a prompt and those that begin
    with a program, without usage lines.
    """
    found: list[Command] = []
    for block in blocks(path):
        if block.language in SHELL:
            found += _of_shell(block, prompts=_prompts(block))
        elif block.language in ("", "text"):
            found += [command for command in _of_text(block) if not is_usage(command.text)]
    return found


def usages(path: Path) -> list[Command]:
    """Usage lines of a page: `memtriage report DIR... [--json]`."""
    return [
        command
        for block in blocks(path)
        if block.language in ("", "text")
        for command in _of_text(block)
        if is_usage(command.text)
    ]


def is_usage(text: str) -> bool:
    """Whether a line has placeholders: brackets, capitals, dots."""
    return "memtriage " in text and _PLACEHOLDER.search(_COMMENT.sub("", text)) is not None


def _prompts(block: Block) -> bool:
    return block.language == "console" or block.text.startswith("$ ")


def _of_text(block: Block) -> Iterator[Command]:
    if block.text.startswith("$ "):
        yield from _of_shell(block, prompts=True)
        return
    for offset, line in enumerate(block.text.splitlines()):
        if _PROGRAM.fullmatch(line):
            yield Command(block.page, block.line + offset, line)


def _of_shell(block: Block, *, prompts: bool) -> Iterator[Command]:
    lines = block.text.splitlines()
    at = 0
    while at < len(lines):
        start = at
        line = lines[at]
        at += 1
        if (prompts and not line.startswith("$ ")) or not line.strip() or line.lstrip().startswith("#"):
            continue
        text = line.removeprefix("$ ") if prompts else line
        while not _complete(text) and at < len(lines):
            text += "\n" + lines[at].removeprefix("> " if prompts else "")
            at += 1
        shown = []
        while prompts and at < len(lines) and not lines[at].startswith("$ "):
            shown.append(lines[at])
            at += 1
        yield Command(block.page, block.line + start, text, tuple(shown))


def _complete(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return not text.endswith("\\")
