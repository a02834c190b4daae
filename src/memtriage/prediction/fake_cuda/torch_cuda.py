"""`torch.cuda` as a machine with one GPU would show it, for the time of a trace."""

from __future__ import annotations

import copyreg
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch.utils import _device

from memtriage.prediction.allocator_conf import AllocatorConf
from memtriage.prediction.fake_cuda import legacy, transfers
from memtriage.prediction.fake_cuda.stand_ins import accepting, around, passing_for, replaced
from memtriage.prediction.fake_cuda.streams import Streams
from memtriage.prediction.fake_cuda.tensors import (
    CPU,
    CUDA,
    fake_device,
    gpu,
    is_host_fake,
    meaning_meta,
)
from memtriage.prediction.gpu_kinds import GpuKind
from memtriage.prediction.lifetimes import Lifetimes
from memtriage.prediction.notes import Notes
from memtriage.prediction.operators import mapped
from memtriage.prediction.simulate import LiveReplay

_MISSING: Final = object()


FACTORIES: Final = (
    *("empty", "empty_strided", "zeros", "ones", "full", "rand", "randn"),
    *(f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")),
    *("randint", "randperm", "arange", "linspace", "logspace", "eye", "scalar_tensor", "empty_permuted"),
    *("tril_indices", "triu_indices"),
)
"""Functions of `torch` that make tensors, each replaced by one that calls it."""
_NEW_FACTORIES: Final = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "new_tensor")

_SILENT: Final = (
    *("_lazy_init", "init", "check_error", "set_device", "set_device_index", "set_device_idx"),
    *("set_sync_debug_mode", "ipc_collect", "empty_host_cache", "set_per_process_memory_fraction"),
    *("reset_accumulated_memory_stats", "reset_accumulated_host_memory_stats"),
    *("reset_peak_host_memory_stats", "_record_memory_history", "_dump_snapshot"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all"),
)
"""Functions of `torch.cuda` and `torch.accelerator` that do nothing. A seed is not taken: programs that set
one in each step have other data, and other routes, in each."""


class _Quiet:
    """A library of C functions that do nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _always(0)


@contextmanager
def fake_cuda(
    machine: GpuKind,
    lifetimes: Lifetimes,
    allocator: LiveReplay,
    conf: AllocatorConf,
    notes: Notes,
    compile: Callable[..., Any],
    generator: torch.Generator,
    devices: int,
) -> Iterator[None]:
    """Makes `torch.cuda` answer as GPUs of this kind; everything is put back at the end.

    Args:
        generator: draws what is known of the device's random numbers.
        devices: how many there are; the program's is `tensors.gpu()`.
    """

    def free_and_total(*args: Any) -> tuple[int, int]:
        return machine.memory - machine.outside - allocator.reserved(), machine.memory

    with ExitStack() as stack:
        if not _numbers_are_devices():
            stack.enter_context(_device_pickled(torch.device))
        streams = Streams(lifetimes)
        of_cuda = {
            **dict.fromkeys(_SILENT, _always(None)),
            **_of_device(machine, devices),
            **_of_memory(machine, lifetimes, allocator),
            "mem_get_info": free_and_total,
            "_set_allocator_settings": conf.change,
            **_of_streams(streams),
            **_of_random(generator),
        }
        parts = [getattr(torch.cuda, part) for part in ("memory", "random", "streams", "graphs")]
        of_accelerator = of_cuda | {
            "current_accelerator": _always(torch.device("cuda")),
            "current_device_index": _index,
            "current_device_idx": _index,
            "get_device_capability": _always({"supported_dtypes": set()}),
            "get_memory_info": free_and_total,
        }
        memory = getattr(torch.accelerator, "memory", torch.accelerator)
        attributes = [
            *_answering([torch.cuda, *parts], of_cuda),
            *_answering([torch.accelerator, memory], of_accelerator),
            (torch, "Stream", streams.stream_type),
            (torch, "Event", streams.event_type),
            *transfers.replacements(lifetimes),
            *legacy.replacements(),
            *_of_torch(notes, conf, compile),
        ]
        made: dict[tuple[int, int], Any] = {}  # one function is known by several names
        for owner, name, value in attributes:
            before = getattr(owner, name, _MISSING)
            # Not every version of torch has all names, and only a build for CUDA has all of `torch._C`.
            if before is not _MISSING or owner is torch._C:
                accepted = made.setdefault((id(before), id(value)), accepting(before, value))
                stack.enter_context(replaced(owner, name, accepted))
        yield


def _answering(owners: Iterable[Any], answers: dict[str, Any]) -> list[tuple[Any, str, Any]]:
    """The attributes to replace, some of which are known in several modules."""
    return [
        (owner, name, value)
        for owner in dict.fromkeys(owners)
        for name, value in answers.items()
        if name in vars(owner)
    ]


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _of_device(machine: GpuKind, devices: int) -> dict[str, Any]:
    major, minor = machine.capability
    properties = SimpleNamespace(
        name=machine.name,
        major=major,
        minor=minor,
        multi_processor_count=machine.multiprocessors,
        max_threads_per_multi_processor=machine.threads_per_multiprocessor,
        total_memory=machine.memory,
        regs_per_multiprocessor=65536,
        max_threads_per_block=1024,
        L2_cache_size=machine.l2_cache,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
    )
    return {
        "is_available": _always(True),
        "is_initialized": _always(True),
        "_initialized": True,  # read by checkpointing
        "device_count": _always(devices),
        "current_device": _index,
        "_exchange_device": _index,
        "_maybe_exchange_device": _index,
        "can_device_access_peer": _always(True),
        "get_device_capability": _always(machine.capability),
        "get_device_name": _always(machine.name),
        "get_device_properties": _always(properties),
        "get_arch_list": _always([f"sm_{major}{minor}"]),
        "get_gencode_flags": _always(f"-gencode compute=compute_{major}{minor},code=sm_{major}{minor}"),
        "is_bf16_supported": _always(machine.bfloat16),
        "is_tf32_supported": _always(machine.bfloat16),
        "is_current_stream_capturing": _always(False),
        "cudart": _always(_Quiet()),
        "get_sync_debug_mode": _always(0),
        **dict.fromkeys(
            ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate"), _always(0)
        ),
    }


def _index(*args: Any, **kwargs: Any) -> int:
    """Index of the program's GPU, which stays the current one whatever it switches to."""
    index: int = gpu().index
    return index


def _of_memory(machine: GpuKind, lifetimes: Lifetimes, allocator: LiveReplay) -> dict[str, Any]:
    """What PyTorch's own functions (`max_memory_allocated`, `memory_summary`) ask, and what writes files."""
    return {
        "memory_stats": lambda *args: allocator.stats(),
        "host_memory_stats": lambda: defaultdict(int),
        "reset_peak_memory_stats": lambda *args: allocator.reset_peaks(),
        "empty_cache": lifetimes.cache_emptied,
        "get_per_process_memory_fraction": _always(1.0),
        "device_memory_used": lambda *args: allocator.reserved() + machine.outside,
        "list_gpu_processes": _always(""),
        "memory_snapshot": _always([]),
        "_snapshot": _always({"segments": [], "device_traces": []}),
    }


def _of_streams(streams: Streams) -> dict[str, Any]:
    return {
        "Stream": streams.stream_type,
        "Event": streams.event_type,
        "ExternalStream": streams.stream_type,
        "current_stream": lambda *args: streams.current,
        "default_stream": _always(streams.default),
        "stream": streams.entered,
        "set_stream": streams.set,
        "synchronize": streams.synchronize,
    }


def _of_random(generator: torch.Generator) -> dict[str, Any]:
    def restore(state: torch.Tensor, *args: Any) -> None:
        if state.shape == generator.get_state().shape:  # a file has one of a GPU
            generator.set_state(state)

    return {
        "initial_seed": _always(0),
        "get_rng_state": lambda *args: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": restore,
        "set_rng_state_all": lambda states: restore(states[0]),
    }


def _readable(
    notes: Notes, original: Callable[..., Any], self: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """`Tensor.numpy`: a host tensor without data gets some, ones, when the program reads it."""
    if is_host_fake(self):
        notes.assume("large tensors of the host are taken as ones where they are read")
        return np.ones(self.shape, original(torch.empty(0, dtype=self.dtype)).dtype)
    return original(self, *args, **kwargs)


def _of_torch(notes: Notes, conf: AllocatorConf, compile: Callable[..., Any]) -> list[tuple[Any, str, Any]]:
    # Before their members are replaced: these sets are made once and kept for good.
    _device._device_constructors()
    torch.overrides.get_overridable_functions()
    context = _device.DeviceContext
    asked_by_context = meaning_meta(
        context.__torch_function__, lambda self, *args: self.device.type == "meta"
    )
    grouped = around(torch._C._group_tensors_by_device_and_dtype, _grouped)
    return [
        *((torch, name, _numbered(meaning_meta(getattr(torch, name), _meta_asked))) for name in FACTORIES),
        *(
            (torch.Tensor, name, _numbered_outside_graphs(getattr(torch.Tensor, name)))
            for name in _NEW_FACTORIES
        ),
        (torch._C._nn, "_parse_to", _first_numbered(torch._C._nn._parse_to)),
        (
            torch,
            "device",
            torch.device
            if _numbers_are_devices()
            else passing_for(torch.device, _first_numbered(torch.device)),
        ),
        (context, "__torch_function__", asked_by_context),
        (torch, "compile", around(torch.compile, compile)),
        # Compares values, which are not known.
        (torch.distributions.Distribution, "_validate_args", False),
        (torch, "Generator", passing_for(torch.Generator, _host_generator(torch.Generator))),
        (torch.Tensor, "numpy", around(torch.Tensor.numpy, _readable, notes)),
        (torch, "tensor", _made_on_host(torch.tensor)),
        (torch, "as_tensor", _made_on_host(torch.as_tensor)),
        (torch, "asarray", _made_on_host(torch.asarray)),
        (torch._C, "_group_tensors_by_device_and_dtype", grouped),
        (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
        (torch._C, "_accelerator_setAllocatorSettings", conf.change),
        (torch._C, "_accelerator_exchangeDevice", _index),
        (torch._C, "_accelerator_maybeExchangeDevice", _index),
        (torch.cuda.nvtx, "_nvtx", _Quiet()),
        (torch.version, "cuda", torch.version.cuda or "13.0"),
        (torch.backends.cuda, "is_built", _always(True)),
        (torch.backends.cudnn, "is_available", _always(True)),
        (torch.backends.cudnn, "version", _always(91900)),
    ]


def _grouped(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Groups of tensors for foreach kernels: C++ would name their true device."""
    groups = original(*args, **kwargs)
    return {
        (fake_device(tensors[0][0]) if tensors and tensors[0] else device, dtype): (tensors, indices)
        for (device, dtype), (tensors, indices) in groups.items()
    }


def _numbers_are_devices() -> bool:
    """Whether this build takes `torch.device(0)` for a GPU, as one for CUDA does."""
    try:
        return bool(torch.device(0).type == "cuda")
    except RuntimeError:
        return False


@contextmanager
def _device_pickled(original: Any) -> Iterator[None]:
    """In the block devices are pickled by the name `torch.device`, whatever that is."""
    copyreg.pickle(original, lambda device: (torch.device, (str(device),)))
    try:
        yield
    finally:
        del copyreg.dispatch_table[original]


def _as_device(given: Any) -> Any:
    return torch.device("cuda", given) if type(given) is int else given


def _numbered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for which `device=0` is a GPU."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _as_device(kwargs["device"])
        return function(*args, **kwargs)

    return call


def _numbered_outside_graphs(method: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor's method; Dynamo, which knows these by their descriptors, calls it as it is."""
    numbered = _numbered(meaning_meta(method, _meta_asked))

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (method if torch.compiler.is_dynamo_compiling() else numbered)(*args, **kwargs)

    return call


def _first_numbered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for which a number as `device` or as its first argument is a GPU."""
    numbered = _numbered(function)  # not in a call, which Dynamo may trace
    return lambda *args, **kwargs: numbered(*map(_as_device, args[:1]), *args[1:], **kwargs)


def _meta_asked(*args: Any, device: Any = None, **kwargs: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _made_on_host(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.tensor(data, device="cuda")`, as C++ does it too: made on the host, then sent to the device."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.pop("device", None)
        if device is None:
            # Of `with torch.device(...):`, not by `get_default_device`, which would come back here.
            device = _device.CURRENT_DEVICE
        wanted = None if device is None else torch.device(_as_device(device))
        if args and isinstance(args[0], torch.Tensor):
            # A tensor that has its place already: C++ would compare with the true device.
            source = args[0] if wanted is None else args[0].to(wanted)
            dtype = kwargs.get("dtype")
            return source if dtype is None else source.to(dtype)
        requires_grad = kwargs.pop("requires_grad", False)
        # C++ reads each tensor in a list for its number.
        made = original(*mapped(args, lambda tensor: tensor.cpu()), device=CPU, **kwargs)
        if wanted is not None and wanted.type != "cpu":
            made = made.to(CUDA if wanted.type == "cuda" else wanted)
        return made.requires_grad_() if requires_grad else made

    return make


def _host_generator(original: Callable[[], Any]) -> Callable[..., Any]:
    """`torch.Generator(device="cuda")`: one of the host instead."""
    return lambda device=None: original()
