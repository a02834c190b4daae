"""What the commands that trace a program have in common: their options, and the traced child process.

`plan` and `predict` are functions of a `NamedProgram` and of their own options. `traces_a_program` adds the
options that name the program, and prints why a trace failed.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, TextIO, TypeVar

import typer

from memtriage.model.target import TraceTarget
from memtriage.model.units import duration, parse_duration
from memtriage.process.messages import Messages, complain

T = TypeVar("T")

_STDERR: Final = 2
_FIRST_LINE_S: Final = 30
"""Where progress is printed line by line; each line comes after twice the time of the one before."""
_LIMIT: Final = "30m"
"""Much longer than traces take, and short enough that a program that never ends is noticed."""
_TRAINING: Final = "With --hf-config: "


@dataclass(frozen=True, slots=True)
class NamedProgram:
    """A program that a command line names, and how its trace runs.

    Attributes:
        figures: `gpu`, `allocator_conf` and `torch_version`: what it is traced for.
        timeout_s: the longest time of a trace.
    """

    target: TraceTarget
    figures: dict[str, Any]
    allow_network: bool
    show_output: bool
    timeout_s: float = parse_duration(_LIMIT, "--timeout")

    def ranks(self, given: int | None) -> int | None:
        """How many ranks the job has: as many as `--ddp` or `--fsdp` say, else `--world-size`.

        Raises:
            ValueError: they differ.
        """
        named = next((name for name in ("ddp", "fsdp") if name in self.target.training), None)
        if named is None:
            return given
        ranks: int = self.target.training[named]
        if given not in (None, ranks):
            raise ValueError(f"use only one of --{named} and --world-size")
        return ranks

    def trace(self, function: str, options: dict[str, Any], returned: type[T]) -> T:
        """Call a function that traces a program in a child process that can change no file.

        Args:
            function: its name in `memtriage.planning.traced_commands`; it takes `target` and options.
            options: those that are the command's own.
            returned: the type of what it returns.

        Raises:
            ValueError: the program or an option cannot be used.
            TraceFailed: the child process ended without a result, or took too long.
        """
        import msgspec

        from memtriage.prediction.sandbox.call import call

        if find_spec("torch") is None:
            raise ValueError(
                "no torch in this environment; expected 2.8 or newer: install memtriage for the python of "
                f"your training, or torch for {sys.executable}"
            )
        with progress_line(sys.stderr) as show:
            return call(
                f"memtriage.planning.traced_commands:{function}",
                {"target": msgspec.to_builtins(self.target), "options": {**self.figures, **options}},
                returned,
                wanted=_likely_written(self.target),
                network=self.allow_network,
                output=_STDERR if self.show_output else None,
                progress=show,
                timeout_s=self.timeout_s,
            )


def _program(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE.py[:FUNCTION]",
            help="A function `build(device)` that returns (model, optimizer, step), or a training script, "
            "which runs until its first steps are done.",
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS...", help="Arguments of the script or module, after --."),
    ] = None,
    module: Annotated[
        str | None, typer.Option("-m", metavar="MODULE", help="Trace a module, as python -m runs it.")
    ] = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="The script never trains: end it early.")
    ] = False,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="KIND", help="GPU to predict for, such as h100 or l4; any other name lists the kinds."
        ),
    ] = "h200",
    allocator_conf: Annotated[
        str | None,
        typer.Option(metavar="CONF", help="As in PYTORCH_CUDA_ALLOC_CONF [default: of the environment]."),
    ] = None,
    torch_version: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Version of torch to predict for [default: installed]."),
    ] = None,
    allow_network: Annotated[
        bool, typer.Option("--allow-network", help="Let the traced program use the network.")
    ] = False,
    show_output: Annotated[
        bool,
        typer.Option("--show-output", help="Show what the traced program prints, on stderr."),
    ] = False,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="Longest time of a trace, such as 90s or 2h.")
    ] = _LIMIT,
    hf_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Trace a Hugging Face model, given its config.json."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"{_TRAINING}samples per micro-batch (8).", show_default=False),
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"{_TRAINING}tokens per sample (2048).", show_default=False),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="P",
            help=f"{_TRAINING}amp-bf16 (default) or fp16-amp (fp32 weights under autocast), fp32, or bf16 "
            "(weights too).",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="O",
            help=f"{_TRAINING}adamw (default), adamw-fused, sgd, sgd-momentum, adafactor, adagrad or "
            "rmsprop.",
        ),
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None,
        typer.Option("--gradient-checkpointing", help=f"{_TRAINING}recompute blocks in backward."),
    ] = None,
    gradient_accumulation: Annotated[
        int | None, typer.Option(metavar="N", help=f"{_TRAINING}micro-batches per step (1).")
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(metavar="A", help=f"{_TRAINING}sdpa, eager, ...; Transformers' choice by default."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(metavar="M", help=f"{_TRAINING}full (default), lora or qlora.")
    ] = None,
    lora_r: Annotated[
        int | None, typer.Option(metavar="R", help=f"{_TRAINING}rank of the adapters; peft's by default.")
    ] = None,
    lora_targets: Annotated[
        str | None,
        typer.Option(metavar="T", help=f"{_TRAINING}all-linear, or names with commas; peft's by default."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="T", help=f"{_TRAINING}causal (default), or TRL's sft, dpo or grpo."),
    ] = None,
    ddp: Annotated[
        int | None, typer.Option(metavar="N", help=f"{_TRAINING}ranks of a job that use DDP.")
    ] = None,
    fsdp: Annotated[
        int | None, typer.Option(metavar="N", help=f"{_TRAINING}ranks that share the model by FSDP.")
    ] = None,
) -> NamedProgram:
    """Return the program that these options name.

    Raises:
        ValueError: they name none, or more than one, or cannot be used.
    """
    training = {
        "batch": batch,
        "seq": seq,
        "precision": precision,
        "optimizer": optimizer,
        "gradient_checkpointing": gradient_checkpointing,
        "gradient_accumulation": gradient_accumulation,
        "attention": attention,
        "method": method,
        "lora_r": lora_r,
        "lora_targets": lora_targets,
        "task": task,
        "ddp": ddp,
        "fsdp": fsdp,
    }
    return NamedProgram(
        target_of(target, arguments, module, hf_config, training, inference),
        {"gpu": gpu, "allocator_conf": allocator_conf, "torch_version": torch_version},
        allow_network,
        show_output,
        parse_duration(timeout, "--timeout"),
    )


def traces_a_program(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options that name a program; it takes the `NamedProgram` as its first argument.

    If the program or an option cannot be used, the command prints why and returns 2.
    """
    named = inspect.signature(_program, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters
    parameters = [*list(own.values())[1:], *named.values()]

    def run(**given: Any) -> int:
        from memtriage.prediction.sandbox.call import TimedOut, TraceFailed

        of_program = {name: given.pop(name) for name in named}
        try:
            return command(_program(**of_program), **given)
        except (ValueError, TraceFailed) as error:
            longer = ": allow more time with --timeout" if isinstance(error, TimedOut) else ""
            complain_of(f"memtriage {command.__name__}", error, longer)
            return 2

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    )
    return run


def target_of(
    name: str | None,
    arguments: list[str] | None,
    module: str | None,
    hf_config: Path | None,
    training: dict[str, Any],
    inference: bool = False,
) -> TraceTarget:
    """The program that a command line names.

    Args:
        name: `FILE.py:FUNCTION` or a script.
        arguments: what follows `--`.
        module: of `-m`; then `name` is its first argument.
        hf_config: the file or folder of a Hugging Face configuration.
        training: the options that only go with it, None where not given.
        inference: whether the program is said never to train.

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
    if inference and (hf_config is not None or (name is not None and ":" in name)):
        raise ValueError(f"--inference needs a script or a module; {named[0]!r} says itself what a step is")
    return TraceTarget(
        name=name,
        module=module,
        arguments=rest,
        inference=inference,
        hf_config=None if hf_config is None else str(hf_config),
        training=given,
    )


def complain_of(speaker: str, error: Exception, advice: str = "") -> None:
    """Print why a trace failed: one line, and the end of what a child that ended by itself has printed."""
    complain(speaker, f"{error}{advice}")
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
def progress_line(stream: TextIO) -> Iterator[Callable[[str, float], None]]:
    """Give a function that shows how far a trace is, and for how many seconds it has run.

    On a terminal it replaces the line before, which is gone at the end. Elsewhere it prints a few lines.
    """
    if stream.isatty():
        from rich.console import Console

        with Console(file=stream).status("starting the trace") as status:
            yield lambda text, seconds: status.update(_progress(text, seconds))
        return
    due = _FIRST_LINE_S

    def show(text: str, seconds: float) -> None:
        nonlocal due
        if seconds >= due:
            due *= 2
            Messages(stream).write(f"memtriage: {_progress(text, seconds)}\n")

    yield show


def _progress(text: str, seconds: float) -> str:
    return f"traced for {duration(seconds)}, {text}"
