"""`memtriage predict`: the peak memory of a step, without a GPU."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memtriage.cli.hf_options import (
    Attention,
    Batch,
    GradientAccumulation,
    GradientCheckpointing,
    HfConfig,
    Optimizer,
    Precision,
    Seq,
    configured,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from memtriage.predict.watch import Program


def predict(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE.py[:FUNCTION]",
            help="A function `build(device)` that returns (model, optimizer, step), where step() runs one "
            "optimizer step; or a whole training script, which runs until it has made its first steps.",
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARG", help="The script's own arguments, behind --."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the prediction as JSON.")] = False,
    steps: Annotated[int, typer.Option(help="Steps to trace; the last one is reported.")] = 2,
    gpu: Annotated[str, typer.Option(help="Kind of GPU.")] = "h200",
    allocator_conf: Annotated[str, typer.Option(metavar="CONF", help="As in PYTORCH_CUDA_ALLOC_CONF.")] = "",
    torch_version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Whose allocator and kernels; the installed one's.")
    ] = None,
    world_size: Annotated[int, typer.Option(metavar="N", help="Ranks of the job.")] = 1,
    rank: Annotated[int, typer.Option(metavar="R", help="The rank that is predicted, from 0.")] = 0,
    explain: Annotated[bool, typer.Option("--explain", help="Show the peak by owner and module.")] = False,
    against: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Compare with what `memtriage run -o DIR` recorded of a real run."),
    ] = None,
    hf_config: HfConfig = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: Precision = None,
    optimizer: Optimizer = None,
    gradient_checkpointing: GradientCheckpointing = None,
    gradient_accumulation: GradientAccumulation = None,
    attention: Attention = None,
) -> int:
    """Predict the peak memory of a training step, without a GPU."""
    import msgspec

    from memtriage.predict.api import predict as predict_program

    training = {
        "batch": batch,
        "seq": seq,
        "precision": precision,
        "optimizer": optimizer,
        "gradient_checkpointing": gradient_checkpointing,
        "gradient_accumulation": gradient_accumulation,
        "attention": attention,
    }
    try:
        # What the program prints is not the result.
        with contextlib.redirect_stdout(sys.stderr):
            prediction = predict_program(
                configured(hf_config, target, training) or _program(target, arguments or []),
                steps=steps,
                gpu=gpu,
                allocator_conf=allocator_conf,
                torch_version=torch_version,
                world_size=world_size,
                rank=rank,
                explain=explain,
                against=against,
            )
    except ValueError as error:
        print(f"memtriage predict: {error}", file=sys.stderr)
        return 2
    if json:
        sys.stdout.write(msgspec.json.encode(prediction).decode() + "\n")
    else:
        from memtriage.report.page import console_for
        from memtriage.report.prediction_text import render

        render(prediction, console_for(sys.stdout))
    return 0


def _program(target: str | None, arguments: list[str]) -> Callable[[Any], Any] | Program:
    """The build function or the script that a target names.

    Raises:
        ValueError: it names none.
    """
    if target is None:
        raise ValueError("nothing to predict; expected FILE.py:FUNCTION, SCRIPT.py or --hf-config FILE")
    from memtriage.predict.build import load
    from memtriage.predict.script import Script

    if ":" not in target:
        return Script(target, arguments)
    if arguments:
        raise ValueError(f"{target!r} takes no arguments; only a script does: {' '.join(arguments)!r}")
    return load(target)
