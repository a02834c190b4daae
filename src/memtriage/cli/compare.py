"""`memtriage compare`: run A/B trials of a job under named variants."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from memtriage.cli.output import Refusal, answer
from memtriage.process.messages import complain

if TYPE_CHECKING:
    from memtriage.prove.state import ComparisonState
    from memtriage.prove.trials import Trials

DIRECTORY: Final = "memtriage-compare"
"""Below it each trials file has a directory, named after its folder and itself."""


def compare(
    file: Annotated[Path, typer.Argument(metavar="TRIALS.toml", help="The variants and the targets.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help=f"Write trials, records and logs to DIR [default: ./{DIRECTORY}/FOLDER-FILE]. Finished "
            "trials in DIR are not run again.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the file and print the trials in order; run nothing.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Report on finished trials; run nothing.")] = False,
    redo: Annotated[
        list[str] | None,
        typer.Option(metavar="VARIANT", help="Run finished trials of VARIANT again. Repeatable."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete earlier trials and start over.")] = False,
) -> int:
    """Compare variants of a job: time, memory, targets."""
    from memtriage.prove.campaign import TerminationRequested, termination_raises
    from memtriage.prove.state import ComparisonState, slug
    from memtriage.prove.table import TrialsError
    from memtriage.prove.trials import read_trials

    try:
        trials = read_trials(file)
        for name in redo or ():
            if name not in trials.names:
                known = ", ".join(map(repr, trials.names))
                raise TrialsError(f"invalid --redo {name!r}: {file} has the variants {known}")
        place = slug(f"{file.absolute().parent.name}-{file.stem}")
        directory = (output or Path(DIRECTORY) / place).absolute()
        if dry_run:
            return _print_plan(trials, directory)
        state = ComparisonState(directory, trials)
        if not report:
            with state.locked(), termination_raises():
                if fresh:
                    _clear(directory)
                state.forget(redo or ())
                state.refuse_changes()
                _run(trials, state)
        elif not directory.is_dir():
            raise TrialsError(f"no such directory: {directory}; use -o to name the directory of the trials")
        return _print_report(trials, state, json)
    except TrialsError as error:
        raise Refusal(error) from None
    except TerminationRequested as error:
        _say("terminated; run the same command again to continue")
        signal.signal(error.signum, signal.SIG_DFL)
        os.kill(os.getpid(), error.signum)
        return 128 + error.signum


def _run(trials: Trials, state: ComparisonState) -> None:
    from memtriage.prove.campaign import Campaign
    from memtriage.prove.processes import kill_leftovers

    if left_running := kill_leftovers(state.directory):
        _say(f"killed processes that earlier trials had left running: {left_running}")
    campaign = Campaign(trials, state, _say)
    if campaign.ended:
        _say(f"{campaign.ended} of the trials have ended already, in {state.directory}")
    try:
        campaign.run()
    except KeyboardInterrupt:
        left = len(campaign.pending())
        kept = f"trials kept: {campaign.ended}, to come: {left}"
        _say(f"interrupted; {kept}; run the same command again to continue")
        raise


def _clear(directory: Path) -> None:
    """Delete the trials of a directory; what else is in it stays."""
    for end in directory.glob("*/round-*"):
        shutil.rmtree(end)


def _print_plan(trials: Trials, directory: Path) -> int:
    from shlex import join

    from memtriage.prove.command import command
    from memtriage.prove.schedule import schedule
    from memtriage.prove.state import ComparisonState

    state = ComparisonState(directory, trials)
    variants = {variant.name: variant for variant in trials.variants}
    for number, name in schedule(trials.names, trials.repeats):
        print(
            f"round {number + 1}  {name}: {join(command(trials, variants[name], state.folder(name, number)))}"
        )
    return 0


def _print_report(trials: Trials, state: ComparisonState, json: bool) -> int:
    from memtriage.prove.result import make_report
    from memtriage.report.trials_text import render

    made = make_report(trials, state)
    return answer(made, json, lambda console: render(made, console))


def _say(text: str) -> None:
    complain("memtriage compare", text)
