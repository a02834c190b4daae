"""Every command line of README, docs, examples and cases is run, or checked as a list with reasons says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memtriage.cli import app
from support import documents
from support.documented_commands import RULES, Rule, as_typed, compare, prepare, rule_for, typed_in
from support.documented_files import MAKERS, Files
from support.documents import Command

ALL = [command for page in documents.pages() for command in documents.commands(page)]
COMMANDS = list({(typed_in(typed), *typed.words, *typed.shown): typed for typed in ALL}.values())
"""Each once, though several pages have it."""


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("documented"))


def _cases() -> list[object]:
    marked = []
    for command in COMMANDS:
        rule = rule_for(command)
        long = rule is not None and rule.long
        marked.append(pytest.param(command, id=str(command)[:90], marks=[pytest.mark.long] if long else []))
    return marked


@pytest.mark.parametrize("command", _cases())
def test_every_command_line_does_what_it_says(
    command: Command,
    files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rule = rule_for(command)
    prepare(command, tmp_path, files)
    if rule is not None:
        rule.check(command, tmp_path)
    elif _by_itself(command):
        monkeypatch.chdir(tmp_path)
        status = app.main(command.words[1:])
        shown = capsys.readouterr()
        assert status == 0, f"{command}\n{shown.out[-2000:]}\n{shown.err}"
        compare(command, shown.out)
    else:
        as_typed(command, tmp_path)


def _by_itself(command: Command) -> bool:
    """Whether it is a sub-command that needs neither a shell nor a process of its own."""
    words = command.words
    return (
        words[0] == "memtriage" and words[1] != "run" and not {"|", ">", "<", ";", "&&", "2>&1"} & set(words)
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.pattern[:60])
def test_no_rule_is_left_over(rule: Rule) -> None:
    assert any(rule_for(command) is rule for command in ALL), (
        "no command line of the documentation needs this any more"
    )


def _within_the_text() -> list[tuple[str, str]]:
    """Commands in the text of a page, where it is, and the command."""
    spans = [(page, line, code) for page in documents.pages() for line, code in documents.code_spans(page)]
    named = re.compile(r"(?:[A-Z_]+=\S+ )*(?:make|(?:python3?|pytest|torchrun)(?: \S+)*? \S+\.py)(?: .*)?")
    return [(f"{documents.name(page)}:{line}", code) for page, line, code in spans if named.fullmatch(code)]


@pytest.mark.parametrize(("where", "code"), _within_the_text())
def test_commands_within_the_text_name_what_exists(where: str, code: str) -> None:
    words = [word for word in code.split() if "=" not in word]
    beside = (documents.ROOT / where).parent
    if words[0] == "make":
        targets = re.findall(
            r"^([a-z-]+):", (documents.ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
        assert set(words[1:]) <= set(targets), where
    for word in words:
        if word.endswith(".py") and word not in MAKERS:
            assert any((base / word).is_file() for base in (documents.ROOT, beside)), f"{where}: {word}"
