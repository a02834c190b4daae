"""`memtriage predict`: the peak memory of a step, without a GPU."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from memtriage.predict.watch import Program

_TRAINING = "With --hf-config: "


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
    hf_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="In place of a program: a Hugging Face model's config.json, trained as by `Trainer`.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help=f"{_TRAINING}samples of a micro-batch (8).", show_default=False)
    ] = None,
    seq: Annotated[
        int | None, typer.Option(help=f"{_TRAINING}tokens of a sample (2048).", show_default=False)
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help=f"{_TRAINING}amp-bf16 (default) or fp16-amp (fp32 weights under autocast), fp32, or bf16 "
            "(weights too).",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help=f"{_TRAINING}adamw (default), adamw-fused, sgd, sgd-momentum, adafactor, adagrad or "
            "rmsprop.",
        ),
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None,
        typer.Option("--gradient-checkpointing", help=f"{_TRAINING}compute blocks again in backward."),
    ] = None,
    gradient_accumulation: Annotated[
        int | None, typer.Option(help=f"{_TRAINING}micro-batches of a step (1).")
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help=f"{_TRAINING}sdpa, eager, ...; Transformers' choice by default.")
    ] = None,
) -> int:
    """Predict the peak memory of a training step, without a GPU."""
    import msgspec

    from memtriage.predict.api import predict as predict_program

    options = {
        "batch": batch,
        "seq": seq,
        "precision": precision,
        "optimizer": optimizer,
        "gradient_checkpointing": gradient_checkpointing,
        "gradient_accumulation": gradient_accumulation,
        "attention": attention,
    }
    training = {name: value for name, value in options.items() if value is not None}
    try:
        # What the program prints is not the result.
        with contextlib.redirect_stdout(sys.stderr):
            prediction = predict_program(
                _program(target, arguments or [])
                if hf_config is None and not training
                else _configured(hf_config, target, training),
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


def _configured(hf_config: Path | None, target: str | None, training: dict[str, Any]) -> Callable[[Any], Any]:
    """The build function of a Hugging Face configuration.

    Raises:
        ValueError: there is none, or another program besides; or it cannot be used.
    """
    if hf_config is None:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in training)
        raise ValueError(f"{given} without --hf-config; a program of your own sets these itself")
    if target is not None:
        raise ValueError(f"--hf-config and {target!r} are both given; expected one of them")
    from memtriage.predict.hf import TrainingArguments, build_from_config

    return build_from_config(hf_config, TrainingArguments(**training))
