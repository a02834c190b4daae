"""What commands call in the child process that traces a program. Arguments and results are JSON."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from memtriage.model.prediction import HostCourse, RankPrediction
from memtriage.model.target import TraceTarget
from memtriage.planning import api
from memtriage.planning.priming import plan_priming
from memtriage.prediction.api import predict_program
from memtriage.prediction.build import Build, load
from memtriage.prediction.distributed.broadcasts import Broadcasts
from memtriage.prediction.many_steps.api import horizon_of_program
from memtriage.prediction.many_steps.programs import ShapedBuild, ShapedScript
from memtriage.prediction.many_steps.shapes import inputs_of
from memtriage.prediction.routing import read_routing
from memtriage.prediction.sandbox.child import report_progress
from memtriage.prediction.script import Script

T = TypeVar("T")


def predict(target: dict[str, Any], options: dict[str, Any]) -> RankPrediction:
    """Predict a target; `options` are those of `prediction.api.predict_program`, or of a horizon.

    `received` among them is what rank 0 sent, as JSON.

    Raises:
        ValueError: the target or an option cannot be used.
    """
    courses: list[HostCourse] = []
    if options.pop("host", False):
        options["host"] = courses.append
    if options.get("world_size") is None:
        options.pop("world_size", None)
    else:
        os.environ["WORLD_SIZE"] = str(options["world_size"])  # as a launcher sets it, of one process too
    broadcasts = options["broadcasts"] = Broadcasts(options.pop("received", None))
    horizon, lengths, routing, limit = (
        options.pop(name, None) for name in ("horizon", "lengths", "routing", "limit")
    )

    def progress(step: int, steps: int) -> None:
        report_progress(f"in step {step} of {steps}")

    if horizon is not None:
        del options["steps"]
        program = _shaped(target, horizon, lengths)
        program.routing = None if routing is None else read_routing(Path(routing))
        prediction = horizon_of_program(program, horizon, limit=limit, **options, progress=progress)
    else:
        prediction = predict_program(_program(target), **options, progress=progress)
    return RankPrediction(
        prediction=prediction,
        host=courses[0] if courses else None,
        sent=broadcasts.sent,
        missed=broadcasts.missed,
    )


def _called(function: Callable[..., T], target: dict[str, Any], options: dict[str, Any]) -> T:
    """Call a function with what a target names; `options` are its keyword arguments.

    Raises:
        ValueError: the target or an option cannot be used.
    """
    return function(_program(target), **options)


plan: Final = partial(_called, api.plan)
sized: Final = partial(_called, api.needs_of)
prime: Final = partial(_called, plan_priming)


def _shaped(given: dict[str, Any], steps: int, lengths: str | None) -> ShapedBuild | ShapedScript:
    """The program that a target names, traced with one input of each shape.

    Args:
        lengths: a file with what each step of a build function gets, as JSON: a list, or an object
            that says how often each length comes.

    Raises:
        ValueError: it, or the file, cannot be found or used.
    """
    target = msgspec.convert(given, TraceTarget)
    program = _program(given)
    if target.hf_config is not None and isinstance(program, Script):
        raise ValueError(
            "--horizon needs batches that differ: those of a configuration's trainer are all the same"
        )
    if not isinstance(program, Script):
        return ShapedBuild(program, inputs_of(_read_lengths(lengths), steps))
    if target.inference:
        raise ValueError("use only one of --horizon and --inference: a script that never trains has no steps")
    name = target.module or target.name
    assert name is not None
    if lengths is not None:
        raise ValueError(
            f"--lengths needs a build function whose step takes a length; the lengths of {name} are "
            "those of its DataLoader"
        )
    return ShapedScript(name, target.arguments, module=target.module is not None, steps=steps)


def _read_lengths(file: str | None) -> Any:
    if file is None:
        return None
    try:
        read = msgspec.json.decode(Path(file).read_bytes(), type=list[int | tuple[int, ...]] | dict[int, int])
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(
            f"--lengths {file}: {error}; expected JSON: a list such as [512, 380] or [[8, 512], [8, 380]], "
            'or how often each length comes, such as {"512": 90, "380": 10}'
        ) from error
    return read


def _program(given: dict[str, Any]) -> Build | Script:
    """The build function, script, module or trainer that a target names.

    Raises:
        ValueError: it cannot be found or used.
    """
    target = msgspec.convert(given, TraceTarget)
    if target.hf_config is not None:
        from memtriage.prediction.finetuning import Finetuning
        from memtriage.prediction.hf import TrainingArguments, build_from_config

        path, arguments = Path(target.hf_config), TrainingArguments(**target.training)
        return Finetuning(path, arguments) if arguments.by_trainer else build_from_config(path, arguments)
    name = target.module or target.name
    if name is None:
        raise ValueError("nothing to trace; expected a build function, a script, a module or a configuration")
    if target.module is None and ":" in name:
        return load(name)
    return Script(name, target.arguments, module=target.module is not None, inference=target.inference)
