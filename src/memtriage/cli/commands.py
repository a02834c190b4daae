"""The sub-commands that a parser reads (all but `run`): groups, examples, and what bad usage looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup

from memtriage.cli.attach import attach
from memtriage.cli.census import census
from memtriage.cli.compare import compare
from memtriage.cli.diff import diff
from memtriage.cli.doctor import doctor
from memtriage.cli.explain import explain
from memtriage.cli.gate import gate
from memtriage.cli.holders import holders
from memtriage.cli.install_listener import install_listener
from memtriage.cli.metrics import metrics
from memtriage.cli.plan import plan
from memtriage.cli.predict import predict
from memtriage.cli.report import report
from memtriage.cli.run import SUMMARY as RUN_SUMMARY
from memtriage.cli.run import USAGE_STATUS
from memtriage.cli.snapshot import snapshot
from memtriage.cli.top import top
from memtriage.model.version import __version__
from memtriage.process.messages import complain

SUMMARY: Final = "Account for every byte of GPU and host memory of a PyTorch training job."

EXIT_STATUSES: Final = {
    "0": "the command did its work, whatever it found",
    "2": "bad usage, or input that cannot be read: one line on stderr says why",
    "3": "`run --fail-on`: a verdict that is listed; `gate`: the peak is too high",
    "4": "`census`: something is missing; the first line says what",
    "other": "`run`: the exit status of the script; 128 + N if signal N ended it",
}
"""Each exit status and what it means; docs/cli.md has the same table."""

_PAUSE: Final = "--pause=50ms"

# The base of all errors of the command line: click's in some releases of typer, its own in others.
_UsageError: Final[type[Exception]] = cast("type[Exception]", typer.BadParameter.__mro__[1])


def _run() -> None:
    """Stand in the list of commands: `memtriage.cli.app` hands `run` on before this parser sees it."""


COMMANDS: Final[Mapping[str, tuple[Callable[..., Any], ...]]] = {
    "Watch a job": (_run, top, report, census, attach, install_listener),
    "Read an error or a recording": (explain, snapshot),
    "Before a run, without a GPU": (predict, plan),
    "Test a change": (diff, gate, compare),
    "Look up": (doctor, holders, metrics),
}
"""The sub-commands by the headings of `memtriage --help`. A command has its function's name, with dashes; the
first line of the docstring is its summary."""

EXAMPLES: Final = """\
memtriage top memtriage-run
memtriage report memtriage-run
memtriage report memtriage-run --html run.html --redact
memtriage census --pid 4711
memtriage census --pid 4711 --pause
memtriage attach 4711 --for 5m
memtriage install-listener
memtriage explain train.log
memtriage explain M8
memtriage snapshot run.pickle
memtriage snapshot run.pickle --html run.html
memtriage predict train.py:build
memtriage predict train.py -- --batch-size 8
memtriage predict --horizon 1000 train.py
memtriage predict --hf-config config.json --batch 8
memtriage predict --hf-config config.json --method lora --task sft
memtriage plan train.py:build --budget 24GiB
memtriage plan --hf-config config.json --budget 80GiB
memtriage plan --hf-config config.json --budget 24GiB --maximize batch
memtriage diff runs/before runs/after
memtriage diff before.pickle after.pickle
memtriage diff --env old/bin/python new/bin/python -- train.py
memtriage gate --base main --budget 24GiB -- train.py --batch-size 8
memtriage compare trials.toml
memtriage doctor
memtriage holders --all
memtriage metrics --grafana > memtriage.json
""".splitlines()
"""Command lines for the help of each command."""


def name_of(command: Callable[..., Any]) -> str:
    """Return the word after `memtriage`."""
    return command.__name__.strip("_").replace("_", "-")


class _Groups(TyperGroup):
    """Lists the commands under headings, in the order of `COMMANDS`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for group, functions in COMMANDS.items():
            names = map(name_of, functions)
            rows = [(name, self.commands[name].get_short_help_str(limit=80)) for name in names]
            with formatter.section(group):
                formatter.write_dl(rows, col_max=10)


class _PlainHelp(TyperCommand):
    """Names arguments in its help as their help texts do, without types and braces."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(_in_usage(each) for each in self.get_params(ctx) if _is_argument(each))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments: list[tuple[str, str]] = []
        options: list[tuple[str, str]] = []
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is not None and _is_argument(each):
                arguments.append((each.metavar or "", record[1].removesuffix("[required]").rstrip()))
            elif record is not None:
                options.append(record)
        for title, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=_WIDEST_NAME)


_WIDEST_NAME: Final = 22
"""Columns for names in a help; the text of a longer name begins on the next line."""


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _in_usage(argument: Any) -> str:
    name: str = argument.metavar
    return name if argument.required or name.startswith("[") else f"[{name}]"


def dispatch(arguments: list[str]) -> int:
    """Parse and run a sub-command and return its exit status. Bad usage is one line on stderr.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    command = typer.main.get_command(_application())
    if arguments[:1] == ["census"]:  # typer has no option whose value may be left out
        arguments = [_PAUSE if argument == "--pause" else argument for argument in arguments]
    try:
        status = command(arguments or ["--help"], prog_name="memtriage", standalone_mode=False)
    except _UsageError as error:
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        line = " ".join(text.split()).rstrip(".")
        context = getattr(error, "ctx", None)  # of the command whose arguments cannot be used
        name = "memtriage" if context is None else context.command_path
        complain(name, f"{line}; see `{name} --help`")
        return USAGE_STATUS
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    return status if isinstance(status, int) else 0


def _application() -> typer.Typer:
    statuses = [f"{status:<7}{meaning}" for status, meaning in EXIT_STATUSES.items()]
    application = typer.Typer(
        cls=_Groups,
        help=SUMMARY,
        epilog=_listed("Exit status", statuses) + "\n\n`memtriage COMMAND --help` has options and examples.",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.callback()(_options)
    for function in chain.from_iterable(COMMANDS.values()):
        name = name_of(function)
        summary = RUN_SUMMARY if name == "run" else None
        examples = [line for line in EXAMPLES if line.split()[1] == name]
        epilog = _listed("Examples", examples) if examples else None
        application.command(name, cls=_PlainHelp, help=summary, epilog=epilog)(function)
    return application


def _listed(title: str, lines: list[str]) -> str:
    """Return a titled list that the help keeps as it is instead of filling lines."""
    return "\n".join(["\b", f"{title}:", *(f"  {line}" for line in lines)])


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"memtriage {__version__}")
        raise typer.Exit()


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Take the options of the command itself."""
