"""`torch.cuda` as a machine with one GPU would show it, for the time of a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.utils import _device

from memtriage.predict.lifetimes import Lifetimes
from memtriage.predict.machines import Machine
from memtriage.predict.notes import Notes
from memtriage.predict.streams import Streams
from memtriage.predict.tensors import CPU, CUDA, meaning_meta, played_device

_META_FACTORIES: Final = ("empty", "empty_strided", "zeros", "ones", "full", "rand", "randn")
_MISSING: Final = object()


class _Place:
    """`with torch.cuda.device(0):`"""

    def __init__(self, *args: Any) -> None:
        pass

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


@contextmanager
def cuda_played(machine: Machine, lifetimes: Lifetimes, notes: Notes) -> Iterator[None]:
    """Makes `torch.cuda` answer as one GPU of this kind; everything is put back at the end."""
    with ExitStack() as stack:
        for owner, name, value in _replacements(machine, lifetimes, notes):
            if hasattr(owner, name):  # not every version of torch has all of them
                stack.enter_context(replaced(owner, name, value))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute is another for the time of the block."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _replacements(machine: Machine, lifetimes: Lifetimes, notes: Notes) -> list[tuple[Any, str, Any]]:
    """Every attribute that is replaced: its owner, its name, its value."""
    streams = Streams(lifetimes)
    of_cuda = {
        **_of_device(machine),
        **_of_memory(machine, lifetimes),
        **_of_streams(streams),
        **_of_random(),
    }
    found: list[tuple[Any, str, Any]] = []
    for owner in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        # Some functions are known by two names; `torch.cuda` has them all.
        found += [(owner, name, value) for name, value in of_cuda.items() if name in vars(owner)]
    found += [(torch, "Stream", streams.stream_type), (torch, "Event", streams.event_type)]
    found += _of_storages(lifetimes)
    found += [(torch.accelerator, name, value) for name, value in _of_accelerator(streams).items()]
    return [*found, *_of_torch(notes)]


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _of_device(machine: Machine) -> dict[str, Any]:
    major, minor = machine.capability
    properties = SimpleNamespace(
        name=machine.name,
        major=major,
        minor=minor,
        multi_processor_count=machine.multiprocessors,
        total_memory=machine.memory,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
    )
    return {
        "_lazy_init": _always(None),
        "init": _always(None),
        "is_available": _always(True),
        "is_initialized": _always(True),
        "device_count": _always(1),
        "current_device": _always(0),
        "set_device": _always(None),
        "device": _Place,
        "get_device_capability": _always(machine.capability),
        "get_device_name": _always(machine.name),
        "get_device_properties": _always(properties),
        "get_arch_list": _always([f"sm_{major}{minor}"]),
        "is_bf16_supported": _always(machine.capability >= (8, 0)),
        "is_current_stream_capturing": _always(False),
    }


def _of_memory(machine: Machine, lifetimes: Lifetimes) -> dict[str, Any]:
    def allocated(*args: Any, **kwargs: Any) -> int:
        return lifetimes.live

    def free_and_total(*args: Any) -> tuple[int, int]:
        return machine.memory - machine.outside - lifetimes.live, machine.memory

    return {
        "mem_get_info": free_and_total,
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": allocated,
        "max_memory_reserved": allocated,
        "reset_peak_memory_stats": _always(None),
        "reset_accumulated_memory_stats": _always(None),
        "memory_summary": _always(""),
        "memory_stats": lambda *args: defaultdict(int),
        "empty_cache": lifetimes.cache_emptied,
        "ipc_collect": _always(None),
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


def _of_storages(lifetimes: Lifetimes) -> list[tuple[Any, str, Any]]:
    """What bypasses the dispatcher."""
    storage = torch.UntypedStorage
    resize, address = storage.resize_, storage.data_ptr

    def resized(self: Any, size: int) -> Any:
        result = resize(self, size)
        lifetimes.resized(self, "resize_")
        return result

    def data_ptr(self: Any) -> int:
        if self.device.type != "meta":
            return int(address(self))
        return int(self._cdata) if self.nbytes() else 0  # told apart by it, never read

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        lifetimes.used_on(self.untyped_storage(), stream.stream_id)

    return [
        (storage, "resize_", resized),
        (storage, "data_ptr", data_ptr),
        (torch.Tensor, "record_stream", record_stream),
    ]


def _of_random() -> dict[str, Any]:
    return {
        "manual_seed": _always(None),
        "manual_seed_all": _always(None),
        "seed": _always(None),
        "seed_all": _always(None),
        "initial_seed": _always(0),
        "get_rng_state": lambda *args: torch.zeros(16, dtype=torch.uint8, device=CPU),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8, device=CPU)],
        "set_rng_state": _always(None),
        "set_rng_state_all": _always(None),
    }


def _of_accelerator(streams: Streams) -> dict[str, Any]:
    return {
        "is_available": _always(True),
        "current_accelerator": _always(torch.device("cuda")),
        "device_count": _always(1),
        "current_device_index": _always(0),
        "current_device_idx": _always(0),
        "set_device_index": _always(None),
        "set_device_idx": _always(None),
        "synchronize": streams.synchronize,
        "current_stream": lambda *args: streams.current,
        "set_stream": streams.set,
    }


def _of_torch(notes: Notes) -> list[tuple[Any, str, Any]]:
    # Before its members are replaced: the set is made once and kept for good.
    _device._device_constructors()
    context = _device.DeviceContext
    asked_by_context = meaning_meta(
        context.__torch_function__, lambda self, *args: self.device.type == "meta"
    )
    grouped = _grouped(torch._C._group_tensors_by_device_and_dtype)
    return [
        *((torch, name, meaning_meta(getattr(torch, name), _meta_asked)) for name in _META_FACTORIES),
        (context, "__torch_function__", asked_by_context),
        (torch, "compile", _not_compiled(notes)),
        (torch, "Generator", _generator(torch.Generator)),
        (torch, "tensor", _made_on_host(torch.tensor)),
        (torch, "as_tensor", _made_on_host(torch.as_tensor)),
        (torch, "asarray", _made_on_host(torch.asarray)),
        (torch._C, "_group_tensors_by_device_and_dtype", grouped),
        (torch.version, "cuda", torch.version.cuda or "13.0"),
        (torch.backends.cuda, "is_built", _always(True)),
        (torch.backends.cudnn, "is_available", _always(True)),
        (torch.backends.cudnn, "version", _always(91900)),
    ]


def _not_compiled(notes: Notes) -> Callable[..., Any]:
    def compile(model: Any = None, **options: Any) -> Any:
        notes.add("compile", "torch.compile is left out: compiled code keeps and recomputes other tensors")
        return model if model is not None else lambda function: function

    return compile


def _grouped(original: Callable[..., Any]) -> Callable[..., Any]:
    """Groups of tensors for foreach kernels: C++ would name their true device."""

    def group(*args: Any, **kwargs: Any) -> Any:
        groups = original(*args, **kwargs)
        return {
            (played_device(tensors[0][0]) if tensors and tensors[0] else device, dtype): (tensors, indices)
            for (device, dtype), (tensors, indices) in groups.items()
        }

    return group


def _meta_asked(*args: Any, device: Any = None, **kwargs: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _made_on_host(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.tensor(data, device="cuda")`, as C++ does it too: made on the host, then sent to the device."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.pop("device", None)
        if device is None:
            # Of `with torch.device(...):`, not by `get_default_device`, which would come back here.
            device = _device.CURRENT_DEVICE
        wanted = (
            None
            if device is None
            else torch.device("cuda", device)
            if isinstance(device, int)
            else torch.device(device)
        )
        if args and isinstance(args[0], torch.Tensor):
            # A tensor that has its place already: C++ would compare with the true device.
            source = args[0] if wanted is None else args[0].to(wanted)
            dtype = kwargs.get("dtype")
            return source if dtype is None else source.to(dtype)
        requires_grad = kwargs.pop("requires_grad", False)
        made = original(*args, device=CPU, **kwargs)
        if wanted is not None and wanted.type != "cpu":
            made = made.to(CUDA if wanted.type == "cuda" else wanted)
        return made.requires_grad_() if requires_grad else made

    return make


def _generator(original: type) -> type:
    """`torch.Generator(device="cuda")`: a generator of the host in its place."""

    class _Type(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    class Generator(metaclass=_Type):
        def __new__(cls, device: Any = None) -> Any:
            return original()

    return Generator
