"""`memtriage plan`: the cheapest set of changes with which a training step fits a budget."""

from __future__ import annotations

import contextlib
import sys
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


def plan(
    budget: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="What the process may use of the device in all, e.g. 80GiB: the allocator's segments and "
            "what lies outside it.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="A function `build(device)` that returns (model, optimizer, step); step() runs one "
            "optimizer step. With a keyword such as micro_batch=16 smaller micro-batches are tried too.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    gpu: Annotated[str, typer.Option(help="Kind of GPU.")] = "h200",
    allocator_conf: Annotated[str, typer.Option(metavar="CONF", help="As in PYTORCH_CUDA_ALLOC_CONF.")] = "",
    torch_version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Whose allocator and kernels; the installed one's.")
    ] = None,
    world_size: Annotated[
        int, typer.Option(metavar="N", help="GPUs of the job; with several, FSDP2 is tried too.")
    ] = 1,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUNG",
            help="Also a rung that changes the task: 'LoRA', 'QLoRA', 'shorter inputs'. Repeatable.",
        ),
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
    """Find the cheapest changes with which a training step fits, without a GPU."""
    import msgspec

    from memtriage.predict.plan.api import plan as plan_build

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
            found = plan_build(
                configured(hf_config, target, training) or _program(target),
                budget,
                gpu=gpu,
                allocator_conf=allocator_conf,
                torch_version=torch_version,
                world_size=world_size,
                allow=allow or (),
            )
    except ValueError as error:
        print(f"memtriage plan: {error}", file=sys.stderr)
        return 2
    if json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        from memtriage.report.page import console_for
        from memtriage.report.plan_text import render

        render(found, console_for(sys.stdout))
    return 0


def _program(target: str | None) -> Callable[..., Any]:
    """The build function that a target names.

    Raises:
        ValueError: it names none.
    """
    from memtriage.predict.build import load

    if target is None:
        raise ValueError("nothing to plan; expected FILE.py:FUNCTION or --hf-config FILE")
    return load(target)
