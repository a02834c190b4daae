"""`memtriage predict`: predict the peak memory of a step, without a GPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from memtriage.cli.output import answer
from memtriage.cli.trace_options import NamedProgram, traces_a_program
from memtriage.model.units import parse_size

RANKS_OF_A_NODE: Final = 8
"""Unless the user says how many."""


@traces_a_program
def predict(
    program: NamedProgram,
    json: Annotated[bool, typer.Option("--json", help="Print the prediction as JSON.")] = False,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to trace.")] = 2,
    horizon: Annotated[
        int | None,
        typer.Option(metavar="N", help="Also simulate N steps with the shapes of their batches."),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --horizon: what each step of a build function gets (JSON)."),
    ] = None,
    routing: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --horizon: tokens per router and expert (JSON)."),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="With --horizon: what the process may reserve: 40GiB or bytes."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--world-size", metavar="N", help="Ranks that a launcher starts.")
    ] = None,
    rank: Annotated[int, typer.Option(metavar="R", help="Rank to predict, from 0.")] = 0,
    every_rank: Annotated[
        bool, typer.Option("--all-ranks", help="Predict all ranks, in groups of equal ones.")
    ] = False,
    host: Annotated[
        bool, typer.Option("--host", help="Also predict the memory of the host, by class.")
    ] = False,
    ranks_per_node: Annotated[
        int | None, typer.Option(metavar="N", help="With --host: ranks of a node [default: up to 8].")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the peak by owner and module.")] = False,
) -> int:
    """Predict the peak memory of a step, without a GPU."""
    from memtriage.model.prediction import RankPrediction
    from memtriage.prediction.distributed.ranks import all_ranks
    from memtriage.prediction.host.replay import add_node
    from memtriage.report.prediction_text import render

    ranks = program.ranks(ranks)
    world_size = 1 if ranks is None else ranks
    options = {
        "steps": steps,
        "world_size": ranks,
        "explain": explain or json,
        "host": host,
        **_horizon_options(horizon, lengths, routing, limit),
    }
    if every_rank and rank:
        raise ValueError("use only one of --all-ranks and --rank")

    if ranks_per_node is not None and not host:
        raise ValueError("--ranks-per-node needs --host")
    on_node = _ranks_of_node(ranks_per_node, world_size)

    def traced(of_rank: int, **received: Any) -> RankPrediction:
        return program.trace("predict", {**options, "rank": of_rank, **received}, RankPrediction)

    @cache
    def predicted(of_rank: int) -> RankPrediction:
        if of_rank == 0:
            return traced(0)
        if not (every_rank or host):  # else rank 0 is predicted anyway
            try:
                found = traced(of_rank)
                if not found.missed:
                    return found
            except ValueError:
                pass  # it may need what rank 0 sends, else it fails again
        return traced(of_rank, received=predicted(0).sent)

    if every_rank:
        prediction = all_ranks(world_size, lambda each: predicted(each).prediction)
    else:
        prediction = predicted(rank).prediction
    if host:
        courses = [predicted(each).host for each in range(min(on_node, 2))]
        add_node(prediction, [course for course in courses if course is not None], on_node)
    return answer(prediction, json, lambda console: render(prediction, console))


def _ranks_of_node(given: int | None, world_size: int) -> int:
    """How many ranks of the job a node has.

    Raises:
        ValueError: no such number.
    """
    if given is None:
        return min(world_size, RANKS_OF_A_NODE)
    if not 1 <= given <= world_size:
        raise ValueError(f"invalid --ranks-per-node {given}: expected 1 to {world_size}, the --world-size")
    return given


def _horizon_options(
    horizon: int | None, lengths: Path | None, routing: Path | None, limit: str | None
) -> dict[str, Any]:
    """What `--horizon` and the options that go with it say.

    Raises:
        ValueError: they cannot be used together.
    """
    if horizon is None:
        for name, given in (("--lengths", lengths), ("--routing", routing), ("--limit", limit)):
            if given is not None:
                raise ValueError(f"{name} needs --horizon N")
        return {}
    if horizon < 1:
        raise ValueError(f"invalid --horizon {horizon}: expected at least 1 step")
    return {
        "horizon": horizon,
        "lengths": None if lengths is None else str(lengths),
        "routing": None if routing is None else str(routing),
        "limit": None if limit is None else parse_size(limit, "--limit"),
    }
