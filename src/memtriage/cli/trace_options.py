"""What the commands that trace a program have in common: their options, and the traced child process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, TextIO, TypeVar

import typer

from memtriage.model.target import TraceTarget
from memtriage.process.messages import complain

T = TypeVar("T")

_STDERR: Final = 2
_TRAINING: Final = "With --hf-config: "

TargetName = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE.py[:FUNCTION]",
        help="A function `build(device)` that returns (model, optimizer, step), or a training script, which "
        "runs until its first steps are done.",
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARG", help="Arguments of the script or module, after --."),
]
Module = Annotated[
    str | None, typer.Option("-m", metavar="MODULE", help="Trace a module, as python -m runs it.")
]
Gpu = Annotated[str, typer.Option(help="GPU to predict for.")]
AllocatorConf = Annotated[
    str | None,
    typer.Option(metavar="CONF", help="As in PYTORCH_CUDA_ALLOC_CONF [default: of the environment]."),
]
TorchVersion = Annotated[
    str | None, typer.Option(metavar="VERSION", help="Version of torch to predict for [default: installed].")
]
AllowNetwork = Annotated[
    bool, typer.Option("--allow-network", help="Let the traced program use the network.")
]
ShowOutput = Annotated[
    bool,
    typer.Option("--show-output", help="Show what the traced program prints, on stderr."),
]
HfConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Trace a Hugging Face model, given its config.json.",
    ),
]
Batch = Annotated[
    int | None, typer.Option(help=f"{_TRAINING}samples per micro-batch (8).", show_default=False)
]
Seq = Annotated[int | None, typer.Option(help=f"{_TRAINING}tokens per sample (2048).", show_default=False)]
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
    typer.Option("--gradient-checkpointing", help=f"{_TRAINING}recompute blocks in backward."),
]
GradientAccumulation = Annotated[int | None, typer.Option(help=f"{_TRAINING}micro-batches per step (1).")]
Attention = Annotated[
    str | None, typer.Option(help=f"{_TRAINING}sdpa, eager, ...; Transformers' choice by default.")
]


def target_of(
    name: str | None,
    arguments: list[str] | None,
    module: str | None,
    hf_config: Path | None,
    training: dict[str, Any],
) -> TraceTarget:
    """The program that a command line names.

    Args:
        name: `FILE.py:FUNCTION` or a script.
        arguments: what follows `--`.
        module: of `-m`; then `name` is its first argument.
        hf_config: the file or folder of a Hugging Face configuration.
        training: the options that only go with it, None where not given.

    Raises:
        ValueError: none, or more than one.
    """
    given = {option: value for option, value in training.items() if value is not None}
    rest = list(arguments or ())
    if module is not None:
        rest, name = [*([] if name is None else [name]), *rest], None
    named = [
        target
        for target in (name, module, None if hf_config is None else "--hf-config")
        if target is not None
    ]
    if len(named) > 1:
        raise ValueError(f"use only one of {' and '.join(map(repr, named))}")
    if not named:
        raise ValueError("nothing to trace: use FILE.py:FUNCTION, SCRIPT.py, -m MODULE or --hf-config FILE")
    if given and hf_config is None:
        options = ", ".join(f"--{option.replace('_', '-')}" for option in given)
        raise ValueError(f"{options} needs --hf-config: a program of your own sets these itself")
    if rest and (hf_config is not None or (name is not None and ":" in name)):
        raise ValueError(
            f"unexpected {' '.join(rest)!r} after {named[0]!r}: only a script or a module takes arguments"
        )
    return TraceTarget(
        name=name,
        module=module,
        arguments=rest,
        hf_config=None if hf_config is None else str(hf_config),
        training=given,
    )


def trace(
    function: str,
    target: TraceTarget,
    options: dict[str, Any],
    returned: type[T],
    *,
    allow_network: bool,
    show_output: bool,
) -> T:
    """Call a function that traces a program in a child process that can change no file.

    Args:
        function: its name in `memtriage.planning.traced_commands`; it takes `target` and `options`.
        returned: the type of what it returns.

    Raises:
        ValueError: the program or an option cannot be used.
        TraceFailed: the child process ended without a result.
    """
    import msgspec

    from memtriage.prediction.sandbox.call import call

    if find_spec("torch") is None:
        raise ValueError(
            "no torch in this environment; expected 2.8 or newer: install memtriage for the python of your "
            f"training, or torch for {sys.executable}"
        )

    with progress_line(sys.stderr) as show:
        return call(
            f"memtriage.planning.traced_commands:{function}",
            {"target": msgspec.to_builtins(target), "options": options},
            returned,
            wanted=_likely_written(target),
            network=allow_network,
            output=_STDERR if show_output else None,
            progress=show,
        )


def complain_of(speaker: str, error: Exception) -> None:
    """Print why a trace failed: one line, and the end of what a child that ended by itself has printed."""
    complain(speaker, error)
    if output := getattr(error, "output", ""):
        print(f"its last output:\n{output}", file=sys.stderr)


def _likely_written(target: TraceTarget) -> list[str]:
    """The folder of the program, and whatever among its arguments may be a path."""
    folder = [os.path.dirname(os.path.abspath(target.name.partition(":")[0]))] if target.name else []
    values = [
        argument.partition("=")[2] or argument
        for argument in target.arguments
        if not argument.startswith("-") or "=" in argument
    ]
    return folder + values


@contextmanager
def progress_line(stream: TextIO) -> Iterator[Callable[[str], None] | None]:
    """Give a function that replaces the line before; None where `stream` is no terminal.

    The line is gone at the end.
    """
    if not stream.isatty():
        yield None
        return
    from rich.console import Console

    with Console(file=stream).status("starting the trace") as status:
        yield lambda text: status.update(text)
