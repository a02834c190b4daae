"""The sub-commands that a parser reads: what their help lists, and what becomes of a wrong line."""

from __future__ import annotations

import re

import pytest
import typer

from memtriage.cli import app, commands
from memtriage.cli.commands import COMMANDS, EXAMPLES, EXIT_STATUSES, dispatch, name_of
from memtriage.model.version import __version__

GROUPS = {title: [name_of(function) for function in functions] for title, functions in COMMANDS.items()}
NAMES = [name for names in GROUPS.values() for name in names]


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_commands_are_listed_under_headings_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch([]) == dispatch(["--help"]) == 0
    text, again = capsys.readouterr().out.split("Usage: memtriage [OPTIONS] COMMAND [ARGS]...\n")[1:]
    assert text == again
    listed = {
        title: re.findall(r"^  ([a-z-]+)(?= |$)", rows, re.MULTILINE)
        for title, rows in re.findall(r"^(\w[^\n]+):\n((?:  .*\n)+)", text, re.MULTILINE)
    }
    assert {title: listed.get(title) for title in GROUPS} == GROUPS
    assert list(listed)[-len(GROUPS) :] == list(GROUPS)
    assert "  run         Run a training script and report what keeps its memory.\n" in text
    assert "  install-listener\n              Let all jobs of this environment answer a census.\n" in text
    statuses = "".join(f"    {status:<7}{meaning}\n" for status, meaning in EXIT_STATUSES.items())
    assert text.endswith(
        f"\n  Exit status:\n{statuses}\n  `memtriage COMMAND --help` has options and examples.\n"
    )


@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_command_fits_and_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([name, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if len(line) > 80]
    assert not re.search(r"[{}]|<\w+", "\n".join(lines))  # as parsers write metavars: `{FILE} <path>`
    summary = lines[lines.index("") + 1].strip()
    assert summary.endswith(".") and len(summary) <= 55
    start = next(number for number, line in enumerate(lines) if line.strip() == "Examples:")
    examples = [line.split() for line in lines[start + 1 :]]
    assert examples
    for words in examples:
        assert "memtriage" in words
        assert words[words.index("memtriage") + 1] == name


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_have_options_that_exist(example: str) -> None:
    _, name, *words = example.partition(" -- ")[0].split()
    command = typer.main.get_command(commands._application()).commands[name]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_all_that_is_shown(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch([option]) == dispatch([option, "doctor"]) == 0
    assert capsys.readouterr().out == 2 * f"memtriage {__version__}\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["nonsense"], "memtriage: No such command 'nonsense'"),
        (["--nonsense"], "memtriage: No such option: --nonsense"),
        (["report"], "memtriage report: Missing argument 'DIR...'"),
        (["doctor", "x"], "memtriage doctor: "),
        (["attach", "x"], "memtriage attach: Invalid value for 'PID': "),
    ],
)
def test_a_wrong_line_is_said_in_one_line(
    line: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(line) == 2
    out, err = capsys.readouterr()
    name = said.partition(":")[0]
    assert out == ""
    assert err.startswith(said) and err.endswith(f"; see `{name} --help`\n")
    assert err.count("\n") == 1 and ".;" not in err


def test_the_status_is_the_command_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def status() -> int:
        """Answer."""
        return 3

    def nothing() -> None:
        """Answer nothing."""

    def interrupted() -> None:
        """Stop."""
        raise typer.Abort

    monkeypatch.setattr(commands, "COMMANDS", {"Look up": (status, nothing, interrupted)})
    assert (dispatch(["status"]), dispatch(["nothing"])) == (3, 0)
    with pytest.raises(KeyboardInterrupt):
        dispatch(["interrupted"])
    assert dispatch(["status", "--help"]) == 0
    assert "Examples" not in capsys.readouterr().out
