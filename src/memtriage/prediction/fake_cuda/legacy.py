"""Legacy tensor types: `torch.cuda.FloatTensor(...)`, `x.type(...)`, `x.new(...)`, a default type of CUDA.

C++ makes their tensors by itself, on the device of a build with CUDA or that a tensor truly has.

Known limitation: after `set_default_tensor_type`, `torch.Tensor(...)` still makes a tensor of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from memtriage.prediction.fake_cuda.stand_ins import around, passing_for
from memtriage.prediction.fake_cuda.tensors import CUDA, fake_device

_TYPES: Final = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}
_NAMES: Final = {dtype: name for name, dtype in _TYPES.items()}
_HOST, _GPU = "torch.", "torch.cuda."


def replacements() -> list[tuple[Any, str, Any]]:
    """The attributes to replace: owner, name, value."""
    return [
        *((torch.cuda, name, _type_of_gpu(name)) for name in _TYPES),
        (torch.Tensor, "type", around(torch.Tensor.type, _typed)),
        (torch.Tensor, "type_as", lambda self, other: self.to(other)),
        (torch.Tensor, "new", around(torch.Tensor.new, _made_new)),
        (torch, "set_default_tensor_type", around(torch.set_default_tensor_type, _default_set)),
    ]


def _type_of_gpu(name: str) -> type:
    """`torch.cuda.FloatTensor`: made of sizes without values, or made on the host and sent to the device."""
    dtype, on_host = _TYPES[name], getattr(torch, name)

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("device", None)
        if not args or isinstance(args[0], (int, torch.Size)):
            size = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
            return torch.empty(size, dtype=dtype, device=CUDA)
        if isinstance(args[0], torch.Tensor):
            return args[0].detach()
        return on_host(*args, **kwargs).to(CUDA)

    made = passing_for(getattr(torch.cuda, name), make, module="torch.cuda")
    made.dtype, made.is_cuda = dtype, True  # type: ignore[attr-defined]
    return made


def _typed(
    original: Callable[..., Any], self: torch.Tensor, dtype: Any = None, non_blocking: bool = False
) -> Any:
    """`Tensor.type`: the name of the type, or the tensor in another one."""
    if dtype is None:
        of_gpu = fake_device(self).type == "cuda"
        return (_GPU if of_gpu else _HOST) + _NAMES[self.dtype] if self.dtype in _NAMES else original(self)
    if isinstance(dtype, torch.dtype):
        return self.to(dtype, non_blocking=non_blocking)
    name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
    place, _, short = name.rpartition(".")
    if short not in _TYPES or f"{place}." not in (_HOST, _GPU):
        return original(self, dtype, non_blocking)
    device = CUDA if f"{place}." == _GPU else torch.device("cpu")
    return self.to(device, _TYPES[short], non_blocking=non_blocking)


def _made_new(
    original: Callable[..., torch.Tensor], self: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """`Tensor.new`: a tensor of the same legacy type."""
    if fake_device(self).type != "cuda":
        return original(self, *args, **kwargs)
    made: torch.Tensor = getattr(torch.cuda, _NAMES[self.dtype])(*args, **kwargs)
    return made


def _default_set(original: Callable[..., None], t: Any) -> None:
    """`set_default_tensor_type`: a default of CUDA is a default device and a default dtype."""
    name = t if isinstance(t, str) else f"{t.__module__}.{t.__name__}"
    if name.startswith(_GPU):
        torch.set_default_dtype(_TYPES[name.removeprefix(_GPU)])
        torch.set_default_device(CUDA)
    else:
        original(t)
        torch.set_default_device(None)
