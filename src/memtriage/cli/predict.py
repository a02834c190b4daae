"""`memtriage predict`: the peak memory of a step, without a GPU."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer


def predict(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="A function `build(device)` that returns (model, optimizer, step); step() runs one "
            "optimizer step.",
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print the prediction as JSON.")] = False,
    steps: Annotated[int, typer.Option(help="Steps to trace; the last one is reported.")] = 2,
    gpu: Annotated[str, typer.Option(help="Kind of GPU.")] = "h200",
    allocator_conf: Annotated[str, typer.Option(metavar="CONF", help="As in PYTORCH_CUDA_ALLOC_CONF.")] = "",
    torch_version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Whose allocator and kernels; the installed one's.")
    ] = None,
) -> int:
    """Predict the peak memory of a training step, without a GPU."""
    import msgspec

    from memtriage.predict.api import predict as predict_build
    from memtriage.predict.build import load

    try:
        # What the program prints is not the result.
        with contextlib.redirect_stdout(sys.stderr):
            prediction = predict_build(
                load(target),
                steps=steps,
                gpu=gpu,
                allocator_conf=allocator_conf,
                torch_version=torch_version,
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
