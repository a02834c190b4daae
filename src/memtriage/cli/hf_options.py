"""The options of commands that take a Hugging Face model in place of a program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

_TRAINING: Final = "With --hf-config: "

HfConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="In place of a program: a Hugging Face model's config.json, trained as by `Trainer`.",
    ),
]
Batch = Annotated[
    int | None, typer.Option(help=f"{_TRAINING}samples of a micro-batch (8).", show_default=False)
]
Seq = Annotated[int | None, typer.Option(help=f"{_TRAINING}tokens of a sample (2048).", show_default=False)]
Precision = Annotated[
    str | None,
    typer.Option(
        help=f"{_TRAINING}amp-bf16 (default) or fp16-amp (fp32 weights under autocast), fp32, or bf16 "
        "(weights too).",
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        help=f"{_TRAINING}adamw (default), adamw-fused, sgd, sgd-momentum, adafactor, adagrad or rmsprop.",
    ),
]
GradientCheckpointing = Annotated[
    bool | None,
    typer.Option("--gradient-checkpointing", help=f"{_TRAINING}compute blocks again in backward."),
]
GradientAccumulation = Annotated[int | None, typer.Option(help=f"{_TRAINING}micro-batches of a step (1).")]
Attention = Annotated[
    str | None, typer.Option(help=f"{_TRAINING}sdpa, eager, ...; Transformers' choice by default.")
]


def configured(
    hf_config: Path | None, target: str | None, training: dict[str, Any]
) -> Callable[..., Any] | None:
    """The build function of a Hugging Face configuration; None without one and without training options.

    Args:
        hf_config: the configuration's file or folder.
        target: another program.
        training: the training options, None where not given.

    Raises:
        ValueError: options without a configuration, or another program besides; or it cannot be used.
    """
    given = {name: value for name, value in training.items() if value is not None}
    if hf_config is None:
        if not given:
            return None
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{named} without --hf-config; a program of your own sets these itself")
    if target is not None:
        raise ValueError(f"--hf-config and {target!r} are both given; expected one of them")
    from memtriage.predict.hf import TrainingArguments, build_from_config

    return build_from_config(hf_config, TrainingArguments(**given))
