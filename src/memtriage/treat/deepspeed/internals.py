"""Where DeepSpeed pins host memory and stages weights, and whether this remedy knows that version.

DeepSpeed's version number does not say: forks and the main branch carry the same. So the parts are checked.
Known from deepspeed 0.19.8, `runtime/zero/stage_1_and_2.py` and `accelerator/abstract_accelerator.py`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final

from memtriage.process.optional import needs

STAGING: Final = "param_buffer_of_bit16_for_cpu_offload_groups"
"""List of 16-bit copies, one per parameter group, through which `step` sends the weights to the device."""

GRADIENT_BUFFER: Final = "temp_grad_buffer_for_cpu_offload"
"""Host memory as large as the largest gradient. 0.19.8 allocates it, frees it and never uses it."""

ACCUMULATE: Final = "async_accumulate_grad_in_cpu_via_gpu"
FINISH: Final = "async_inplace_copy_grad_to_fp32_buffer_from_gpu"
"""Methods that add a gradient to its 16-bit sum, and that write an fp32 gradient."""

_SUMS: Final = "accumulated_grads_in_cpu"
_STAGING_READERS: Final = frozenset({"__init__", "step", "_unpin_offload_buffers"})
_SUMS_READERS: Final = frozenset(
    {"__init__", ACCUMULATE, "set_norm_for_param_grad", "_restore_cpu_offload_grad_to_gpu"}
)
_KEEPERS: Final = frozenset({"__init__", "_unpin_offload_buffers"})
_PINNING: Final = {"_torch_pin_memory": 1, "_torch_empty_pinned": 2}
"""The accelerator's methods that DeepSpeed pins memory with, and their number of arguments."""


class UnknownDeepSpeed(RuntimeError):
    """This DeepSpeed differs from those that the remedy knows; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Internals:
    """The parts of DeepSpeed that the remedy touches.

    Attributes:
        accelerator: the process's accelerator object.
        optimizer: class `DeepSpeedZeroOptimizer`, that of ZeRO-1 and ZeRO-2.
        drops_gradient_buffer: whether nothing reads `GRADIENT_BUFFER`, so that it can be dropped.
    """

    accelerator: Any
    optimizer: Any
    drops_gradient_buffer: bool

    @property
    def on_cuda(self) -> bool:
        """Whether memory can be page-locked by registering it with CUDA."""
        return bool(self.accelerator.device_name() == "cuda")


def find_internals(*, sums: bool = False) -> Internals:
    """Import DeepSpeed and check what it is made of.

    Args:
        sums: also check the parts needed to share the sums of micro-batches.

    Raises:
        ImportError: it is not installed.
        UnknownDeepSpeed: something is not as expected; the text says what was found.
    """
    with needs("deepspeed", "deepspeed", "deepspeed_exact_host_memory()"):
        version = getattr(importlib.import_module("deepspeed"), "__version__", "of unknown version")
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    module = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
    optimizer: Any = getattr(module, "DeepSpeedZeroOptimizer", None)
    wrong = [*_wrong_accelerator(accelerator), *_wrong_optimizer(optimizer)]
    if sums and not wrong:
        wrong = [*_wrong_sums(optimizer)]
    if wrong:
        raise UnknownDeepSpeed(
            f"deepspeed {version} is not built as expected (known: 0.19.8), so nothing was changed: "
            + "; ".join(wrong)
        )
    unread = _readers(optimizer, GRADIENT_BUFFER) <= _KEEPERS
    return Internals(accelerator, optimizer, drops_gradient_buffer=unread)


def _wrong_accelerator(accelerator: Any) -> Iterator[str]:
    for name, count in _PINNING.items():
        method = getattr(accelerator, name, None)
        if not callable(method):
            yield f"{type(accelerator).__name__} has no method {name}, through which memory would be pinned"
        elif len(inspect.signature(method).parameters) != count:
            expected = "(tensor)" if count == 1 else "(tensor, shape)"
            yield f"{name}{inspect.signature(method)} was found, expected {name}{expected}"


def _wrong_optimizer(optimizer: Any) -> Iterator[str]:
    if not isinstance(optimizer, type):
        yield "runtime.zero.stage_1_and_2 has no class DeepSpeedZeroOptimizer"
        return
    if not callable(getattr(optimizer, "initialize_optimizer_states", None)):
        yield "DeepSpeedZeroOptimizer has no method initialize_optimizer_states"
    elif "__init__" not in _readers(optimizer, "initialize_optimizer_states"):
        yield "DeepSpeedZeroOptimizer.__init__ does not call initialize_optimizer_states"
    yield from _wrong_readers(optimizer, STAGING, {"__init__", "step"}, _STAGING_READERS)


def _wrong_sums(optimizer: type) -> Iterator[str]:
    for name in (ACCUMULATE, FINISH):
        if not callable(getattr(optimizer, name, None)):
            yield f"DeepSpeedZeroOptimizer has no method {name}"
    yield from _wrong_readers(optimizer, _SUMS, {"__init__", ACCUMULATE}, _SUMS_READERS)


def _wrong_readers(optimizer: type, name: str, least: Set[str], most: Set[str]) -> Iterator[str]:
    readers = _readers(optimizer, name)
    if not least <= readers <= most:
        where = ", ".join(sorted(readers)) or "nothing"
        yield f"{where} of DeepSpeedZeroOptimizer uses {name}, expected {', '.join(sorted(most))}"


def _readers(owner: type, name: str) -> set[str]:
    """Names of the methods whose code mentions an attribute (or a string) of that name."""
    return {
        method
        for method, value in vars(owner).items()
        if inspect.isfunction(value) and name in _mentioned(inspect.unwrap(value))
    }


def _mentioned(function: Callable[..., Any]) -> set[str]:
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        names.update(const for const in code.co_consts if isinstance(const, str))
        codes.extend(const for const in code.co_consts if isinstance(const, CodeType))
    return names
