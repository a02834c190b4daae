"""Runs every operator without data: shapes by meta kernels, lifetimes noted, small values followed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from memtriage.prediction import shapes
from memtriage.prediction.compiled.entry import Compiler
from memtriage.prediction.data_dependent import DATA_RULES, FILLS, NUMBER
from memtriage.prediction.distributed.broadcasts import BROADCAST, Broadcasts
from memtriage.prediction.distributed.collectives import WAITED_FOR_LATER, Collectives
from memtriage.prediction.engine import ADD, adds_in_place, held_alone, references_to_first
from memtriage.prediction.fake_cuda.composites import Composites
from memtriage.prediction.fake_cuda.python_kernels import PythonKernels
from memtriage.prediction.fake_cuda.stand_ins import replaced
from memtriage.prediction.fake_cuda.tensors import (
    CPU,
    CUDA,
    META,
    as_device,
    is_gpu,
    is_host_fake,
    kernel,
    meta_is_meant,
    true_device,
)
from memtriage.prediction.host.memory import MemoryPlace
from memtriage.prediction.host.program import HostNotes
from memtriage.prediction.known_shapes import KnownShapes
from memtriage.prediction.lifetimes import Lifetimes
from memtriage.prediction.notes import Notes
from memtriage.prediction.operators import Args, Kwargs, Operator, facts, mapped, tensors_in
from memtriage.prediction.scratch import convolution, products
from memtriage.prediction.scratch.stages import AT_THE_END, BEFORE
from memtriage.prediction.scratch.table import Scratch
from memtriage.prediction.values import INTEGER_LIMIT, KnownValues

HOST_LIMIT: Final = 1 << 20
"""Tensors of the host are made for real up to this many elements, and without data beyond."""

MULTIPLIES: Final = products.PRODUCTS | convolution.RULES.keys()
"""Operators that take no tensor of the host together with those of the device."""


class Interpreter(TorchDispatchMode):  # type: ignore[misc]
    """The dispatch mode of a trace.

    Attributes:
        lifetimes: where storages are noted.
        values: what is known of their contents.
        notes: what had to be assumed.
        host: follows storages of the host; None unless asked for.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        lifetimes: Lifetimes,
        values: KnownValues,
        notes: Notes,
        scratch: Scratch,
        composites: Composites,
        collectives: Collectives,
        broadcasts: Broadcasts,
        compiler: Compiler,
    ) -> None:
        super().__init__()
        held_alone()
        self._one_at_a_time = threading.RLock()
        self._references = 0  # to the first operand of the addition that is being dispatched
        self.lifetimes = lifetimes
        self.values = values
        self.notes = notes
        self.host: HostNotes | None = None
        self._pid = os.getpid()
        self._scratch = scratch
        self._composites = composites.kernels
        self._collectives = collectives
        self._broadcasts = broadcasts
        self._compiler = compiler
        self._python_kernels = PythonKernels()
        self._shapes = KnownShapes()
        lifetimes.freed = values.forget

    @contextmanager
    def in_threads(self) -> Iterator[None]:
        """Threads started in the block are traced too: a mode holds in the thread that entered it alone."""
        start = threading.Thread.start
        mode = _ModeOfThreads(self)

        def started(thread: threading.Thread) -> None:
            run = thread.run

            def traced() -> None:
                del thread.run  # which refers to the thread
                _push_mode(mode)
                try:
                    run()
                finally:
                    _pop_mode()

            thread.run = traced  # type: ignore[method-assign]
            start(thread)

        try:
            with replaced(threading.Thread, "start", started):
                yield
        finally:
            mode.interpreter = None

    def ignore_compile_internals(self) -> bool:
        """Whether Dynamo compiles under this mode, which is off meanwhile; asked by PyTorch."""
        return self._compiler.active

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        with self._one_at_a_time:
            if func is ADD:
                self._references = references_to_first(args)
            if not torch._C._len_torch_function_stack():
                return self._answer(func, types, args, kwargs or {})
            # C++ called the operator (a reducer, a broadcast) inside a `with torch.device(...):`, which would
            # take the questions below for the program's.
            with torch._C.DisableTorchFunction():
                return self._answer(func, types, args, kwargs or {})

    def _answer(self, func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        if types and not all(map(_plain, types)):
            # A wrapper (DTensor) runs its own parts first.
            return NotImplemented
        compiler_traces = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if os.getpid() != self._pid or compiler_traces:
            # A worker of a DataLoader was forked from this thread: what it loads is real. What a compiler
            # traces for itself (the functions of flex_attention) is not on the device.
            return func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
            if self.host is not None:
                with replaced(self.host.memory, "place", MemoryPlace.PINNED):
                    return self._answer(func, types, args, kwargs)
        operator = facts(func)
        tensors = tensors_in(args, kwargs)
        if self.host is not None and operator.communicates:
            self.host.collective(func, args)
        if operator.name == BROADCAST:
            self._broadcasts.follow(args, self.values)
        faked = any(is_gpu(tensor) or is_host_fake(tensor) for tensor in tensors)
        if not faked and ((operator.written and tensors) or not self._makes_fake(operator, args, kwargs)):
            real = func(*args, **kwargs)
            if self.host is not None:
                self.host.operator(operator, tensors, operator.targets(args, kwargs), tensors_in(real))
            return real
        if operator.has_device and kwargs.get("device") == META and meta_is_meant():
            with kernel():
                return func(*args, **kwargs)
        if operator.makes and self.lifetimes.over is not None:
            self.lifetimes.over()
        if operator.collective:
            return self._collectives.answer(func, args, kwargs)
        if operator.name == WAITED_FOR_LATER:
            return args[0]
        if operator.composite and torch.is_inference_mode_enabled():
            composite = self._composites.get(func, func.decompose)
            if composite is not None:
                with self:
                    return composite(*args, **kwargs)
        special = DATA_RULES.get(func)
        if special is not None:
            answer = special(self, func, args, kwargs)
            if answer is not NotImplemented:
                return answer
        with self:
            answer = self._python_kernels.run(func, args, kwargs)
        if answer is not NotImplemented:
            return answer
        return self.run(func, args, kwargs)

    def _higher_order(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run what an operator that takes operators does on a GPU.

        Raises:
            NotImplementedError: it is none of those that a trace knows.
        """
        if func.name() == "graphsafe_run_with_rng_state":
            # Compiled code draws again what forward has drawn.
            operator, *given = args
            with self:
                return operator(
                    *given, **{name: value for name, value in kwargs.items() if name != "rng_state"}
                )
        eager = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
        if eager is None:
            raise NotImplementedError(
                f"torch.ops.higher_order.{func.name()} cannot be traced outside torch.compile"
            )
        with self:
            return eager(*args, **kwargs)

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Runs an operator that takes or makes tensors without data."""
        operator = facts(func)
        targets = operator.targets(args, kwargs)
        tensors = tensors_in(args, kwargs)
        if self.lifetimes.overwritten and (operator.makes or targets):
            self.lifetimes.check_intact(tensors)
        if targets and not any(true_device(target).type == "meta" for target in targets):
            # The host receives what the device sends; what is unknown stays as it was.
            known = self.values.compute(func, args, kwargs)
            return known if known is not None else targets[0]
        if func in MULTIPLIES:  # CUDA raises where a tensor was left on the host; numbers may be there
            if any(map(is_gpu, tensors)) and any(tensor.dim() and not is_gpu(tensor) for tensor in tensors):
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but "
                    f"{func._schema.name} got one on the CPU and one on cuda:0"
                )
        elif func is ADD and adds_in_place(args, self._references):
            return args[0]
        # What is written stays where it is, whatever is written to it.
        device = self._result_device(targets or tensors, kwargs)
        meta_args, meta_kwargs = mapped(args, _without_data), mapped(kwargs, _without_data)
        if operator.has_device and kwargs.get("device") is not None:
            meta_kwargs["device"] = META
        with kernel():
            key = self._shapes.key(func, operator, meta_args, meta_kwargs)
            made = self._shapes.find(key)
            if made is None:
                made = _shaped(func, operator, meta_args, meta_kwargs)
                self._shapes.keep(key, made, meta_args, meta_kwargs)
        result = mapped(made, lambda value: as_device(value, device))
        outputs = tensors_in(result)
        self._note(func, operator, args, kwargs, targets, outputs)
        if self.host is not None:
            self.host.operator(operator, tensors, targets, outputs)
        if device.type == "cpu" and not targets and any(map(is_gpu, tensors)):
            return mapped(result, self._on_host)
        return result

    def _makes_fake(self, operator: Operator, args: Args, kwargs: Kwargs) -> bool:
        """Whether an operator on real tensors makes one on the device, or a large one on the host."""
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":
            return True
        if device is not None and device.type == "meta":
            return operator.has_device and not meta_is_meant() and not tensors_in(args)
        if not operator.has_device or tensors_in(args, kwargs):
            return False
        return any(torch.Size(arg).numel() > HOST_LIMIT for arg in args if _is_size(arg))

    def _result_device(self, tensors: list[torch.Tensor], kwargs: Kwargs) -> torch.device:
        device = kwargs.get("device")
        if device is not None and device.type != "meta":
            return CUDA if device.type == "cuda" else CPU
        if any(map(is_gpu, tensors)):
            return CUDA
        return CPU if tensors or device is None else CUDA

    def _note(
        self,
        func: Any,
        operator: Operator,
        args: Args,
        kwargs: Kwargs,
        targets: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        on_device = any(map(is_gpu, (*outputs, *targets)))  # kernels of the host have no buffers there
        stages = self._scratch(func, args, kwargs, outputs) if on_device else {}
        held = self.lifetimes.scratch(stages.get(BEFORE, []), operator.name)
        fresh: list[torch.Tensor] = []
        in_order = reversed(outputs) if func in shapes.LAST_FIRST else outputs
        for position, output in enumerate(in_order, 1):
            if is_gpu(output):
                if self.lifetimes.see(output.untyped_storage(), operator.name):
                    fresh.append(output)
            elif is_host_fake(output):
                fresh.append(output)
            self._hold(stages.get(position), operator)
        if operator.resizes:
            for target in targets:
                self.lifetimes.resized(target.untyped_storage(), operator.name)
        if on_device:
            self._scratch.keep(func, args)
        self.lifetimes.release(held)
        self._hold(stages.get(AT_THE_END), operator)
        if targets:
            self.lifetimes.written.update(
                block
                for target in targets
                if (block := self.lifetimes.block_of(target.untyped_storage())) is not None
            )
            self._follow_writes(func, args, kwargs, targets)
        elif (
            fresh
            and func not in self._python_kernels.native  # its kernel for the host may compile itself first
            and all(tensor.numel() <= INTEGER_LIMIT for tensor in fresh)
        ):
            known = tensors_in(self.values.compute(func, args, kwargs))
            for output, value in zip(outputs, known, strict=False):
                if output.shape == value.shape:
                    self.values.note(output, value)

    def _hold(self, sizes: list[int] | None, operator: Operator) -> None:
        """Buffers come and go inside an operator."""
        if sizes:
            self.lifetimes.release(self.lifetimes.scratch(sizes, operator.name))

    def _follow_writes(self, func: Any, args: Args, kwargs: Kwargs, targets: list[torch.Tensor]) -> None:
        first = targets[0]
        # A fresh buffer that is filled as a whole becomes known by it.
        if func in FILLS and self.values.of(first) is None and first.numel() <= INTEGER_LIMIT:
            self.values.note(first, torch.empty(first.shape, dtype=first.dtype, device=CPU))
        unknown = any(self.values.of(target) is None for target in targets)
        if unknown or self.values.compute(func, args, kwargs) is None:
            for target in targets:
                self.values.forget(target.untyped_storage()._cdata)

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that the program copied to the host: real while it is small."""
        known = self.values.of(tensor)
        if known is not None:
            self.values.ask(known)
            return known.clone()
        if tensor.numel() > HOST_LIMIT:
            return tensor
        self.notes.assume(f"values copied to the host are taken as {NUMBER}")
        return torch.full(tensor.shape, NUMBER, dtype=tensor.dtype, device=CPU)


class _ModeOfThreads(TorchDispatchMode):  # type: ignore[misc]
    """The mode of threads that are started in a trace.

    A thread may outlive the trace, as tqdm's monitor does, and then runs operators as they are. It must keep
    nothing of the trace: a tensor that it frees while Python ends aborts the process.

    Attributes:
        interpreter: the mode of the trace; None once that is over.
    """

    supports_higher_order_operators = True

    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__()
        self.interpreter: Interpreter | None = interpreter

    def ignore_compile_internals(self) -> bool:
        return self.interpreter is not None and self.interpreter.ignore_compile_internals()

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if self.interpreter is None:
            return func(*args, **(kwargs or {}))
        return self.interpreter.__torch_dispatch__(func, types, args, kwargs)


def _shaped(func: Any, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
    """The results of an operator, of which only shapes are known."""
    try:
        return shapes.RULES.get(func, func)(*args, **kwargs)
    except NotImplementedError:
        written = operator.targets(args, kwargs)
        if operator.writes_alone == len(written):
            # `_scaled_mm.out` returns what it was given to write.
            return written[0] if len(written) == 1 else tuple(written)
        if operator.writes_alone == 0:
            return None
        raise


def _plain(kind: Any) -> bool:
    """Whether tensors of this type hold their own storage: they leave dispatch to the modes."""
    plain: bool = kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return plain


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or for one with data on the host its like on the meta device."""
    if true_device(tensor).type == "cpu" and tensor.layout is torch.strided:
        if tensor.dim() == 0:
            # Zero-dimensional tensors of the host do not take part in type promotion as those of a device.
            return tensor
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)
    return tensor


def _is_size(argument: Any) -> bool:
    return isinstance(argument, (list, tuple, torch.Size)) and all(isinstance(item, int) for item in argument)
