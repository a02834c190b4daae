"""What `build(device)` must return, and where it is found."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from memtriage.model.code_origin import is_installed
from memtriage.observe.origin import package_folder
from memtriage.prediction.fake_cuda.extensions import compiled_parts_optional
from memtriage.prediction.fake_cuda.tensors import parts

EXPECTED: Final = (
    "expected `build(device)` to return (model, optimizer, step), where step() runs one optimizer step"
)

Build = Callable[..., Any]
"""A user's build function: takes a device, returns model, optimizer and step. See `EXPECTED`."""


class BuildError(ValueError):
    """The build function cannot be used. The text says what to change."""


@dataclass(frozen=True, slots=True)
class Built:
    """What a build function returned."""

    model: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    step: Callable[[], Any]


def parameters_of(*optimizers: Any) -> Iterator[torch.Tensor]:
    """The parameters that optimizers were given."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def parameters_in(models: Iterable[torch.nn.Module], optimizers: Iterable[Any]) -> Iterable[torch.Tensor]:
    """The parameters of models and of optimizers, each once."""
    of_models = (parameter for model in models for parameter in model.parameters())
    return {id(each): each for each in (*of_models, *parameters_of(*optimizers))}.values()


def check_built(result: Any) -> Built:
    """The parts of what `build` returned.

    Raises:
        BuildError: it is something else, or its parameters are not on the device.
    """
    if not isinstance(result, (tuple, list)) or len(result) != 3:
        if inspect.iscoroutine(result):
            result.close()  # so that Python does not warn that it was never awaited
            raise BuildError(f"{EXPECTED}; it is `async def`: make it a plain function")
        what = f"{len(result)} things" if isinstance(result, (tuple, list)) else f"a {type(result).__name__}"
        raise BuildError(f"{EXPECTED}; it returned {what}")
    model, optimizer, step = result
    if not isinstance(model, torch.nn.Module):
        raise BuildError(f"{EXPECTED}; its first part is a {type(model).__name__}, not a torch.nn.Module")
    optimizers = tuple(optimizer) if isinstance(optimizer, (tuple, list)) else (optimizer,)
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer) and not hasattr(each, "param_groups"):
            raise BuildError(f"{EXPECTED}; its second part is a {type(each).__name__}, not an optimizer")
    if not callable(step):
        raise BuildError(f"{EXPECTED}; its third part is a {type(step).__name__}, which cannot be called")
    if not any(True for _ in model.parameters()):
        raise BuildError(
            "the model that `build` returned has no parameters: return the module that is trained"
        )
    on_host = all(
        parameter.device.type == "cpu" and parts(parameter)[0] is parameter
        for parameter in model.parameters()
    )
    # Parameters of FSDP1 modules may be on the host between steps.
    wrapped = (getattr(module, "cpu_offload", None) for module in model.modules())
    if on_host and not any(getattr(offload, "offload_params", False) for offload in wrapped):
        raise BuildError(
            "all parameters of the model are on the CPU: use the `device` that `build` is given, "
            "as in `model.to(device)`"
        )
    return Built(model, optimizers, step)


def check_done(result: Any) -> None:
    """Check that `step()` has run its step.

    Raises:
        BuildError: it returned something that is still to be run, such as a coroutine.
    """
    if inspect.iscoroutine(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        kind = type(result).__name__
        if hasattr(result, "close"):
            result.close()
        raise BuildError(
            f"`step()` returned a {kind}, so nothing has run: make it a plain function, without async and "
            "yield, that runs one optimizer step"
        )


def failure(error: Exception, assumptions: Sequence[str] = ()) -> BuildError:
    """The error of a program that could not be traced, in words that say what to change.

    Args:
        assumptions: what was assumed about values until then.
    """
    text = " ".join(str(error).split())[:_MESSAGE_LIMIT] or "no message"
    raised = f"{type(error).__name__}{_place(error)}: {text}"
    if _is_own(error):
        return BuildError(f"this is a fault of memtriage, not of the program; please report it: {raised}")
    said = f"the program raised {raised}"
    if isinstance(error, _UNRELATED):
        advice = next((advice for sign, advice in _MISSING.items() if sign in text), None)
        return BuildError(said if advice is None else f"{said}; {advice}")
    operator = _without_shapes(error)
    if operator is not None:
        return BuildError(_register(operator, _place(error)))
    known = _advice(error)
    if known is not None:
        return BuildError(f"{said}; {known}")
    if assumptions:
        return BuildError(
            f"{said}; if a value of the device led here ({assumptions[-1]}), take it out of the step: such "
            "values are not known in a prediction"
        )
    return BuildError(said)


def of_the_trace(error: Exception) -> bool:
    """Whether this error is known to come from the trace, not from the program."""
    return _is_own(error) or _without_shapes(error) is not None or _advice(error) is not None


def _is_own(error: Exception) -> bool:
    """Whether an error is about memtriage's own code, or was raised there by a mistake.

    Errors of other types are raised there on behalf of the program: C functions are called from there.
    """
    if _OWN_FOLDER in str(error):
        return True
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, _MISTAKES) and any(file.startswith(_OWN_FOLDER) for file in files[-1:])


def _advice(error: Exception) -> str | None:
    """What to change in a program that raised this; None if unknown."""
    text = f"{type(error).__name__}: {error}"
    return next((advice for sign, advice in _ADVICE.items() if sign in text), None)


_NO_SHAPES: Final = (
    re.compile(r"no fake impl registered for <CustomOpDef\(([\w.]+::\w+)\)>"),
    re.compile(r"([\w.]+::[\w.]+): attempted to run this operator with Meta tensors"),
    re.compile(r"Could not run '([\w.]+::[\w.]+)' with arguments from the"),
)
"""Messages of PyTorch about an operator without a shape function, with its name."""


def _without_shapes(error: BaseException) -> str | None:
    """The operator without a shape function (a fake implementation) that an error is about."""
    link: BaseException | None = error
    while link is not None:
        for message in _NO_SHAPES:
            found = message.search(str(link))
            if found is not None:
                return found[1]
        link = link.__cause__ or link.__context__
    return None


def _register(name: str, place: str) -> str:
    """What to register for an operator, in one line."""
    space, _, rest = name.partition("::")
    short, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, space), short, None)
    schema = None if packet is None else getattr(packet, overload or "default")._schema
    if schema is None:
        return f"the operator {name}{place} has no shape function"
    arguments = ", ".join(argument.name for argument in schema.arguments)
    returned = str(schema).rpartition("->")[2].strip()
    return (
        f"the operator {name}{place} has no shape function: register one before the step, as in "
        f'@torch.library.register_fake("{name}") def _({arguments}): return torch.empty_like(...), with '
        f"empty tensors of the shapes that it returns ({returned})"
    )


_UNRELATED: Final = (ImportError, OSError, SyntaxError, NameError)
"""Errors that neither the device nor the values of tensors can cause."""
_MISTAKES: Final = (AttributeError, KeyError, NameError, AssertionError)
"""Errors that torch's functions in C do not raise."""
_MESSAGE_LIMIT: Final = 400
_NO_VALUES: Final = "values of the device are not known in a prediction: take this out of the step"
_WORLD: Final = (
    "it is started as ranks by a launcher: give their number with world_size (--world-size N, also of one)"
)
_ADVICE: Final = {
    "Sparse": "sparse tensors cannot be traced: use dense gradients",
    "not linked with support for cuda": "only threads that `threading` starts are traced: use no others",
    "data_ptr": "a kernel needs the address of real data: give the build function a variant without it",
    "overwritten by a subsequent run": "torch raises it on a GPU as well",
    "CUDAGraph": "CUDA graphs cannot be traced: run the step without capturing it",
    "torch.distributed using env": _WORLD,
    "process group has not been initialized": _WORLD,
    "have NCCL built in": _WORLD,
    "numpy": _NO_VALUES,
    "no data": _NO_VALUES,
    "Expected all tensors to be on the same device": "send inputs and every part of the model to `device`",
    "expected device cpu but got meta": "send inputs and every part of the model to `device`",
    "does not require grad": "train at least one parameter: all that the loss depends on are frozen",
    "missing 1 required positional argument": EXPECTED,
    "takes 0 positional arguments": EXPECTED,
}
"""What to change, by a part of the message."""
_MISSING: Final = {
    "mpi4py": _WORLD,  # DeepSpeed asks MPI for the ranks where no launcher has set them
    "CUDA_HOME": "kernels that are compiled for a GPU cannot be traced: use torch's optimizers and operators",
}
"""What to change, by a part of the message of one of the `_UNRELATED` errors."""


def _place(error: Exception) -> str:
    """Where the program itself was, outside installed packages."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f" at {error.filename}:{error.lineno}"
    place = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not (is_installed(file) or file.startswith(_OWN_FOLDER)):
            place = f" at {file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


_OWN_FOLDER: Final = package_folder()


def load(target: str) -> Callable[[Any], Any]:
    """The function that `FILE.py:FUNCTION` names; the file is run, with its folder on the import path.

    Raises:
        BuildError: no such file or function, or the file cannot be imported.
    """
    file, separator, name = target.rpartition(":")
    if not separator or not file.endswith(".py") or not name:
        raise BuildError(f"{target!r} names no function; expected FILE.py:FUNCTION, as in train.py:build")
    path = Path(file)
    if not path.is_file():
        raise BuildError(f"no such file: {file!r}; expected a Python file with the function {name!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules.setdefault(path.stem, module)
    try:
        with compiled_parts_optional():
            spec.loader.exec_module(module)
    except Exception as error:
        raise BuildError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and not key.startswith("_")
        )
        raise BuildError(f"{file} has no function {name!r}; it has {there or 'none'}")
    build: Callable[[Any], Any] = function
    return build
