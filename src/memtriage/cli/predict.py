"""`memtriage predict`: predict the peak memory of a step, without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from memtriage.cli import trace_options as options


def predict(
    target: options.TargetName = None,
    arguments: options.Arguments = None,
    module: options.Module = None,
    json: Annotated[bool, typer.Option("--json", help="Print the prediction as JSON.")] = False,
    steps: Annotated[int, typer.Option(help="Steps to trace.")] = 2,
    gpu: options.Gpu = "h200",
    allocator_conf: options.AllocatorConf = None,
    torch_version: options.TorchVersion = None,
    world_size: Annotated[int, typer.Option(metavar="N", help="Ranks of the job.")] = 1,
    rank: Annotated[int, typer.Option(metavar="R", help="Rank to predict, from 0.")] = 0,
    explain: Annotated[bool, typer.Option("--explain", help="Show the peak by owner and module.")] = False,
    against: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Compare with a run recorded by `memtriage run -o DIR`."),
    ] = None,
    allow_network: options.AllowNetwork = False,
    show_output: options.ShowOutput = False,
    hf_config: options.HfConfig = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    precision: options.Precision = None,
    optimizer: options.Optimizer = None,
    gradient_checkpointing: options.GradientCheckpointing = None,
    gradient_accumulation: options.GradientAccumulation = None,
    attention: options.Attention = None,
) -> int:
    """Predict the peak memory of a step, without a GPU."""
    import msgspec

    from memtriage.model.prediction import Prediction
    from memtriage.prediction.sandbox.call import TraceFailed

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
        prediction = options.trace(
            "predict",
            options.target_of(target, arguments, module, hf_config, training),
            {
                "steps": steps,
                "gpu": gpu,
                "allocator_conf": allocator_conf,
                "torch_version": torch_version,
                "world_size": world_size,
                "rank": rank,
                "explain": explain,
                "against": None if against is None else str(against),
            },
            Prediction,
            allow_network=allow_network,
            show_output=show_output,
        )
    except (ValueError, TraceFailed) as error:
        options.complain_of("memtriage predict", error)
        return 2
    if json:
        sys.stdout.write(msgspec.json.encode(prediction).decode() + "\n")
    else:
        from memtriage.report.console import console_for
        from memtriage.report.prediction_text import render

        render(prediction, console_for(sys.stdout))
    return 0
