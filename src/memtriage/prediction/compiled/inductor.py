"""Runs Inductor without a GPU: lowering, fusion, scheduling and the wrapper are real, kernels do nothing.

The wrapper's `call` runs on the tensors of the trace: its buffers come, go and are reused as on the GPU.
All private names of Dynamo and Inductor are here and in `fakes.py`; `missing` says whether they are there.

Known limitations: kernels chosen by trial (`max_autotune`) are not simulated.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any, Final

import torch

from memtriage.prediction.compiled import fakes
from memtriage.prediction.compiled.graphs import CudaGraphs
from memtriage.prediction.compiled.padding import MatrixProduct, Paddings
from memtriage.prediction.compiled.trials import HostKernel, Kernel, KernelTrials
from memtriage.prediction.fake_cuda.stand_ins import all_replaced, around, replaced
from memtriage.prediction.fake_cuda.tensors import CUDA, gpu
from memtriage.prediction.fake_cuda.torch_cuda import FACTORIES
from memtriage.prediction.gpu_kinds import GpuKind
from memtriage.process.collector import collector_paused

_NEEDED: Final = {
    "torch._dynamo.device_interface": ("CudaInterface", "caching_worker_device_properties"),
    "torch._dynamo": ("callback_handler",),
    "torch._dynamo.trace_rules": ("get_torch_obj_rule_map",),
    "torch._dynamo.variables.optimizer": ("OptimizerVariable",),
    "torch._inductor.async_compile": ("AsyncCompile",),
    "torch._inductor.constant_folding": ("ConstantFolder",),
    "torch._inductor.fx_passes.pad_mm": (
        *("_should_pad", "get_padded_length", "get_alignment_size"),
        "is_mm_compute_bound",
    ),
    "torch._inductor.utils": ("get_gpu_dram_gbps",),
    "torch._subclasses.fake_tensor": (
        *("FakeTensor", "FakeTensorConverter", "FakeTensorMode", "init_gpu_context"),
        *("_DISPATCH_META_HANDLERS", "in_kernel_invocation_manager"),
    ),
    "torch._subclasses.functional_tensor": ("FunctionalTensor", "FunctionalTensorMode"),
    "torch.fx.experimental.proxy_tensor": ("ProxyTorchDispatchMode", "unset_fake_temporarily"),
    "torch._subclasses.fake_impls": ("in_kernel_invocation_manager",),
    "torch._inductor.runtime.triton_helpers": ("set_driver_to_gpu",),
    "torch._utils_internal": ("max_clock_rate",),
    "torch.utils._triton": ("triton_hash_with_backend",),
}
"""Private names that are replaced or called, by module."""


def missing() -> str | None:
    """What keeps `torch.compile` from being simulated, in words; None when nothing does."""
    if importlib.util.find_spec("triton") is None:
        return "Inductor needs Triton, which is not installed (pip install triton)"
    for name, attributes in _NEEDED.items():
        try:
            module = importlib.import_module(name)
        except ImportError:
            return f"torch {torch.__version__} has no {name}"
        for attribute in attributes:
            if not hasattr(module, attribute):
                return f"torch {torch.__version__} has no {name}.{attribute}"
    return None


_CLOCK: Final = 2000
"""MHz of the multiprocessors, which Inductor asks `nvidia-smi` for.

It takes MHz for kHz in `get_device_tflops` (torch 2.11 and 2.13), so that every product counts as bound by
arithmetic, and is timed, where its own list lacks the GPU.
"""


@contextmanager
def without_gpu(
    machine: GpuKind,
    trials: KernelTrials,
    paddings: Paddings,
    states_made: Callable[[Any], None],
    graphs: CudaGraphs,
) -> Iterator[None]:
    """In the block Inductor compiles for this kind of GPU; what it compiled is dropped at the end.

    To be entered in the mode of the trace.

    Args:
        paddings: decides which matrix products are padded.
        states_made: called with each optimizer whose step is compiled, once its states are there.
    """
    from torch._inductor import config

    with ExitStack() as stack:
        caches = _caches()
        stack.callback(_cleared, caches)
        # Compiled code calls stand-ins, and guards on them.
        stack.callback(_drop_compiled)
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        attributes = (
            *fakes.replacements(),
            *_replacements(machine, trials, paddings),
            *_of_optimizers(mode, states_made),
            *graphs.replacements(),
            _in_graphs([getattr(torch, name) for name in FACTORIES]),
        )
        stack.enter_context(all_replaced(attributes))
        stack.callback(graphs.drop)
        # Workers would not know the stand-ins; caches would keep code for a GPU that is not there.
        stack.enter_context(config.patch(compile_threads=1, force_disable_caches=True))
        stack.enter_context(_uncollected())
        _cleared(caches)
        _modes_ignored()
        yield


@contextmanager
def _uncollected() -> Iterator[None]:
    """In the block the garbage collector rests while something is compiled.

    It would go through everything that was imported, again and again; nothing of the program runs meanwhile.
    """
    handler, paused = torch._dynamo.callback_handler, ExitStack()

    def begun(_: object) -> None:
        paused.enter_context(collector_paused())

    def ended(_: object) -> None:
        paused.close()

    handler.register_start_callback(begun)
    handler.register_end_callback(ended)
    try:
        yield
    finally:
        # `torch._dynamo.reset()` has dropped them where the program called it.
        if begun in handler.start_callbacks:
            handler.remove_start_callback(begun)
            handler.remove_end_callback(ended)


def _in_graphs(functions: list[Any]) -> tuple[Any, str, Any]:
    """What makes Dynamo put calls of these stand-ins into graphs, as it does those of what they stand for.

    It would follow their own code otherwise. By `torch.compiler.allow_in_graph` they would count as the
    program's own: Dynamo then refuses a graph that a backend cannot compile, instead of leaving it eager.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import TorchInGraphFunctionVariable

    original = trace_rules.get_torch_obj_rule_map

    @functools.cache
    def rules() -> dict[Any, Any]:
        # Neither from its cache nor into it.
        return {**original.__wrapped__(), **dict.fromkeys(functions, TorchInGraphFunctionVariable)}

    return trace_rules, original.__name__, rules


def _drop_compiled() -> None:
    """Drop what was compiled, save the graphs, which need what is replaced (`CudaGraphs.drop`)."""
    with replaced(torch.cuda, "is_available", lambda: False):
        torch._dynamo.reset()


def _modes_ignored() -> None:
    """Say again that the mode of the trace lets Dynamo compile: it was asked when it was entered."""
    modes = torch.utils._python_dispatch
    if hasattr(modes, "set_is_in_mode_without_ignore_compile_internals"):
        modes._is_in_any_mode_without_ignore_compile_internals = False
        modes.set_is_in_mode_without_ignore_compile_internals(False)


def graphs() -> int:
    """How many graphs Dynamo has made in this process."""
    made: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return made


def _replacements(machine: GpuKind, trials: KernelTrials, paddings: Paddings) -> list[tuple[Any, str, Any]]:
    from torch import _utils_internal
    from torch._dynamo import device_interface
    from torch._inductor import async_compile, constant_folding, utils
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime import triton_helpers
    from torch.utils import _triton

    folder = constant_folding.ConstantFolder
    kernels = async_compile.AsyncCompile
    return [
        (kernels, "triton", lambda self, name, source, device_str="cuda": Kernel(name, source, trials)),
        *(
            (kernels, name, lambda self, *args, **kwargs: HostKernel())
            for name in ("cpp", "cpp_pybinding", "multi_kernel")
            if hasattr(kernels, name)
        ),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        *(
            (kernels, name, classmethod(lambda cls: None))
            for name in ("warm_pool", "wakeup")
            if hasattr(kernels, name)
        ),
        (torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided),
        (torch.cuda, "default_generators", (_Generator(),) * torch.cuda.device_count()),
        (device_interface, "get_cuda_stream", lambda index: 0),
        *_of_interface(device_interface.CudaInterface),
        (folder, "run", around(folder.run, _folded_on_host)),
        (pad_mm, "_should_pad", _padding(paddings, pad_mm, trials)),
        (_utils_internal, "max_clock_rate", lambda: _CLOCK),
        (utils, "get_gpu_dram_gbps", lambda: machine.bandwidth / 1e9),
        (_triton, "triton_hash_with_backend", lambda: "none"),
    ]


def _of_interface(interface: Any) -> list[tuple[Any, str, Any]]:
    """Dynamo's view of CUDA, which took its functions from `torch.cuda` when it was imported."""
    names = (
        *(
            "current_device",
            "set_device",
            "device_count",
            "stream",
            "current_stream",
            "set_stream",
            "synchronize",
        ),
        *("get_device_properties", "exchange_device", "maybe_exchange_device", "is_bf16_supported"),
    )
    functions = {name: getattr(torch.cuda, name, None) or getattr(torch.cuda, f"_{name}") for name in names}
    functions["get_raw_stream"] = lambda index: 0
    return [(interface, name, staticmethod(function)) for name, function in functions.items()]


def _of_optimizers(
    mode: AbstractContextManager[Any], states_made: Callable[[Any], None]
) -> list[tuple[Any, str, Any]]:
    """The states of an optimizer, which Dynamo makes while it compiles a step, outside of all modes."""
    from torch._dynamo.variables import optimizer as variables

    def call_method(self: Any, tx: Any, name: str, *args: Any) -> Any:
        optimizer = self.value
        if name != "_init_group" or not hasattr(optimizer, name):
            return original(self, tx, name, *args)
        makes_states = optimizer._init_group

        def in_mode(*args: Any, **kwargs: Any) -> Any:
            with mode:
                answer = makes_states(*args, **kwargs)
            states_made(optimizer)
            return answer

        with replaced(optimizer, name, in_mode):
            return original(self, tx, name, *args)

    def move_step_if_cpu(self: Any) -> None:
        with mode:
            moves_steps(self)

    variable = variables.OptimizerVariable
    original, moves_steps = variable.call_method, variable.move_step_if_cpu
    return [
        (variable, "call_method", call_method),
        (variable, "move_step_if_cpu", move_step_if_cpu),
    ]


class _Generator(torch._C.Generator):  # type: ignore[misc]
    """The default generator of a GPU, whose state recomputed dropout saves and restores."""

    @property
    def device(self) -> torch.device:
        return gpu()

    def clone_state(self) -> _Generator:
        return self

    def graphsafe_get_state(self) -> _Generator:
        return self

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        """Nothing is drawn."""


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=CUDA)


def _folded_on_host(original: Callable[..., Any], self: Any) -> Any:
    with fakes.MadeOnHost():
        return original(self)


def _padding(paddings: Paddings, pad_mm: ModuleType, trials: KernelTrials) -> Callable[..., bool]:
    """`_should_pad`, which runs both products on the GPU and takes the faster one."""

    def should_pad(match: Any, left: Any, right: Any, op: Any, input: Any = None) -> bool:
        *batch, rows, inner = map(_expected, left.shape)
        columns = _expected(right.shape[-1])
        alignment = pad_mm.get_alignment_size(left)
        # Lengths that vary are not padded.
        lengths = (*left.shape[-2:], right.shape[-1])
        product = MatrixProduct(
            dtype=left.dtype,
            batch=batch[0] if batch else 1,
            rows=rows,
            inner=inner,
            columns=columns,
            added=tuple(pad_mm.get_padded_length(length, alignment) for length in lengths),
            made_padded=tuple(pad_mm.should_exclude_padding_time(match, name) for name in ("mat1", "mat2")),
            in_rows=tuple(bool(operand.stride(-1) == 1) for operand in (left, right)),
        )
        if not pad_mm.is_mm_compute_bound(rows, inner, columns, left.dtype):
            return False
        if not paddings.known(product):
            args = (left, right) if input is None else (input, left, right)
            trials.pad(op.default, args, product.operands(), product.result(), *product.padded())
        return paddings.is_padded(product)

    return should_pad


def _expected(length: Any) -> int:
    """A length; of one that varies, the one it is timed with."""
    if isinstance(length, int):
        return length
    guess = getattr(torch.fx.experimental.symbolic_shapes, "optimization_hint", None)  # torch 2.13
    return int(length.node.hint if guess is None else guess(length))


def _caches() -> list[Callable[[], None]]:
    """Empties what these modules remember of the GPU."""
    from torch._dynamo import device_interface
    from torch._inductor import utils
    from torch._inductor.runtime import hints
    from torch.utils import _triton

    holders = (_triton, utils, hints.DeviceProperties)
    return [
        device_interface.caching_worker_device_properties.clear,
        device_interface.caching_worker_current_devices.clear,
        *(
            value.cache_clear
            for holder in holders
            for value in (getattr(holder, name) for name in vars(holder))
            if hasattr(value, "cache_clear")
        ),
    ]


def _cleared(caches: list[Callable[[], None]]) -> None:
    for clear in caches:
        clear()
