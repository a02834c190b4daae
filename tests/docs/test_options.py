"""Pages and `--help` say the same: every option is described, and none that does not exist."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
import typer

from memtriage.cli import commands, run
from memtriage.prediction.gpu_kinds import GPU_KINDS
from support import documents
from support.documented_commands import script_options
from support.documents import ROOT

_OPTION: Final = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_PAGES: Final = {
    "predict": ("predict.md", "predict-distributed.md", "predict-horizon.md"),
    "snapshot": ("snapshot.md", "snapshot-html.md"),
}
_OTHERS: Final = {
    "--nproc-per-node": "torchrun",
    "--module": "deepspeed",
    "--no-deps": "pip",
    "--strict": "mypy",
}
"""Options that the documentation mentions, of programs that are not memtriage's."""


@functools.cache
def _subcommands() -> dict[str, Any]:
    application: Any = typer.main.get_command(commands._application())
    return dict(application.commands)


@functools.cache
def _options(command: str) -> set[str]:
    """The long options of a command."""
    if command == "run":  # which reads its own, and lets the script's through
        defined = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", run.HELP, re.MULTILINE)
        return set(defined) - {"--help"}
    parameters = _subcommands()[command].params
    return {option for parameter in parameters for option in parameter.opts if option.startswith("--")} - {
        "--help"
    }


def _pages(command: str) -> tuple[str, ...]:
    return tuple(f"docs/{page}" for page in _PAGES.get(command, (f"{command}.md",)))


@pytest.mark.parametrize("command", _subcommands())
def test_every_command_has_a_page_that_describes_every_option(command: str) -> None:
    described = {
        option
        for page in _pages(command)
        for _, code in documents.code_spans(ROOT / page)
        for option in _OPTION.findall(code)
    }
    assert _options(command) <= described, f"{_pages(command)}: {_options(command) - described}"


def test_every_kind_of_gpu_is_on_the_page_of_predict() -> None:
    assert GPU_KINDS.keys() <= {code for _, code in documents.code_spans(ROOT / "docs/predict.md")}


@pytest.mark.parametrize("command", _subcommands())
def test_every_command_has_a_usage_line_on_its_page(command: str) -> None:
    lines = [usage.words[1] for page in _pages(command) for usage in documents.usages(ROOT / page)]
    assert command in lines


def _mentions() -> Iterator[tuple[str, str, str]]:
    """Each mention of one of memtriage's commands with options: where, the command, the option."""
    for page in documents.pages():
        texts = [
            (command.line, command.text) for command in (*documents.usages(page), *documents.commands(page))
        ]
        for line, text in [*texts, *documents.code_spans(page)]:
            match = re.match(r"(?:.*-m )?memtriage ([a-z]+)\b(.*)", text, re.DOTALL)
            if match is None or match[1] not in _subcommands():
                continue
            own = re.split(r" -- |\S+\.py\b| -m " if match[1] == "run" else " -- ", match[2])[0]
            for option in _OPTION.findall(own):
                yield f"{documents.name(page)}:{line}", match[1], option


def test_commands_are_only_given_options_that_they_have() -> None:
    wrong = [mention for mention in _mentions() if mention[2] not in _options(mention[1]) | {"--help"}]
    assert not wrong


def test_every_option_that_is_mentioned_exists_somewhere() -> None:
    known = (
        {option for command in _subcommands() for option in _options(command)}
        | {"--help", "--version", "--install-completion", "--show-completion"}
        | set(_OTHERS)
    )
    for folder in (
        "examples",
        "benchmarks",
        "src/memtriage/integrations/notebook",
        *(str(path.relative_to(ROOT)) for path in ROOT.glob("cases/*/")),
    ):
        for script in ROOT.glob(f"{folder}/*.py"):
            known |= script_options(script)
    documented = {
        option: f"{documents.name(page)}:{line}"
        for page in documents.pages()
        for line, code in documents.code_spans(page)
        for option in _OPTION.findall(code)
    }
    assert not {option: where for option, where in documented.items() if option not in known}


def test_every_command_that_is_named_exists() -> None:
    for page in documents.pages():
        for line, code in documents.code_spans(page):
            match = re.fullmatch(r"memtriage ([a-z][a-z-]*)(?: .*)?", code)
            assert match is None or match[1] in _subcommands(), f"{documents.name(page)}:{line}: {code}"


def test_the_table_of_exit_statuses_is_that_of_the_help() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    for status, meaning in commands.EXIT_STATUSES.items():
        assert f"| {status} | {meaning} |" in page
