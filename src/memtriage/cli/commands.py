"""The sub-commands that a parser reads (all but `run`), and what their bad usage looks like."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Final, cast

import typer

from memtriage.cli.census import census
from memtriage.cli.compare import compare
from memtriage.cli.doctor import doctor
from memtriage.cli.explain import explain
from memtriage.cli.holders import holders
from memtriage.cli.metrics import metrics
from memtriage.cli.plan import plan
from memtriage.cli.predict import predict
from memtriage.cli.report import report
from memtriage.cli.snapshot import snapshot
from memtriage.cli.top import top
from memtriage.process.messages import complain

SUMMARY: Final = "Where every byte of memory is in a PyTorch training run, who holds it, and what to change."
USAGE_STATUS: Final = 2

# The base of all errors of the command line: click's in some releases of typer, its own in others.
_UsageError: Final[type[Exception]] = cast("type[Exception]", typer.BadParameter.__mro__[1])


def dispatch(arguments: list[str]) -> int:
    """Parse and run a sub-command and return its exit status. Bad usage is one line on stderr.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    command = typer.main.get_command(_application())
    try:
        status = command(arguments or ["--help"], prog_name="memtriage", standalone_mode=False)
    except _UsageError as error:
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        line = " ".join(text.split()).rstrip(".")
        complain("memtriage", f"{line}; see `memtriage --help`")
        return USAGE_STATUS
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    return status if isinstance(status, int) else 0


def _application() -> typer.Typer:
    application = typer.Typer(
        help=SUMMARY,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.callback()(_options)
    application.command("run", help="Watch a training script while it runs.")(_run)
    application.command("explain")(explain)
    application.command("predict")(predict)
    application.command("plan")(plan)
    application.command("compare")(compare)
    application.command("holders")(holders)
    application.command("report")(report)
    application.command("snapshot")(snapshot)
    application.command("metrics")(metrics)
    application.command("top")(top)
    application.command("census")(census)
    application.command("doctor")(doctor)
    return application


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"memtriage {version('memtriage')}")
        raise typer.Exit()


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options of the command itself."""


def _run() -> None:
    """Stand in the list of commands: `memtriage.cli.app` hands `run` on before this parser sees it."""
