"""`memtriage plan`: find the cheapest set of changes with which a training step fits a budget."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from memtriage.cli import trace_options as options


def plan(
    budget: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Device memory for the whole process: 80GiB, 24000MB or bytes.",
        ),
    ],
    target: options.TargetName = None,
    arguments: options.Arguments = None,
    module: options.Module = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    gpu: options.Gpu = "h200",
    allocator_conf: options.AllocatorConf = None,
    torch_version: options.TorchVersion = None,
    world_size: Annotated[
        int, typer.Option(metavar="N", help="GPUs of the job; above 1, FSDP2 is tried too.")
    ] = 1,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUNG",
            help="Also try 'torch.compile', 'activation budget', 'LoRA', 'QLoRA' or 'shorter inputs'.",
        ),
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
    """Find the cheapest changes that fit a memory budget."""
    import msgspec

    from memtriage.model.plan import Plan
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
        result = options.trace(
            "plan",
            options.target_of(target, arguments, module, hf_config, training),
            {
                "budget": budget,
                "gpu": gpu,
                "allocator_conf": allocator_conf,
                "torch_version": torch_version,
                "world_size": world_size,
                "allow": allow or [],
            },
            Plan,
            allow_network=allow_network,
            show_output=show_output,
        )
    except (ValueError, TraceFailed) as error:
        options.complain_of("memtriage plan", error)
        return 2
    if json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        from memtriage.report.console import console_for
        from memtriage.report.plan_text import render

        render(result, console_for(sys.stdout))
    return 0
