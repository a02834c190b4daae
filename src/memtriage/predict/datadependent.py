"""Operators whose result depends on data: read from the known values, else a stated default."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from memtriage.predict.tensors import CUDA, META, as_device, kernel, true_device

if TYPE_CHECKING:
    from memtriage.predict.interpreter import Interpreter

aten: Final = torch.ops.aten

VALUE_LIMIT: Final = 1 << 22
"""Values are only followed while every output has at most this many elements."""
NUMBER: Final = 1
"""What an unknown number is taken for: no division by it fails, no size of it is empty."""

FILLS: Final = frozenset(
    {
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.zero_.default,
        aten.copy_.default,
        aten.random_.default,
        aten.random_.to,
        getattr(aten.random_, "from"),
    }
)
"""Operators that write every element of their target, whatever was there."""


def _item(mode: Interpreter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: torch.Tensor = args[0]
    known = mode.values.of(tensor)
    if known is not None:
        return known.item()
    if tensor.dtype is torch.bool:
        mode.notes.assume("a condition on unknown values is taken as False")
        return False
    mode.notes.assume(f"an unknown number is taken as {NUMBER}")
    return NUMBER if not tensor.is_floating_point() else float(NUMBER)


def _equal(mode: Interpreter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = (_known(mode, each) for each in args[:2])
    if left is not None and right is not None:
        return torch.equal(left, right)
    mode.notes.assume("tensors compared as a whole are taken as different")
    return False


def _nonzero(mode: Interpreter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: torch.Tensor = args[0]
    known = _known(mode, tensor)
    if known is not None:
        found = torch.nonzero(known)
        result = _make(mode, func, found.shape, torch.int64)
        mode.values.note(result, found)
        return result
    mode.notes.assume("every element of an unknown mask is taken as true")
    return _make(mode, func, (tensor.numel(), tensor.dim()), torch.int64)


def _masked_select(mode: Interpreter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    count = _count(mode, mode.run(aten.expand.default, (args[1], shape), {}))
    return _make(mode, func, (count,), args[0].dtype)


def _index(mode: Interpreter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x[mask]`: the device turns the mask into indices first, one vector a dimension."""
    indices = args[1]
    if not any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices):
        return NotImplemented
    expanded: list[torch.Tensor | None] = []
    for each in indices:
        if each is None or each.dtype not in (torch.bool, torch.uint8):
            expanded.append(each)
            continue
        found = _nonzero(mode, aten.nonzero.default, (each,), {})
        expanded.extend(mode.run(aten.unbind.int, (found, 1), {}))
    return mode.run(func, (args[0], expanded, *args[2:]), kwargs)


def _unique(mode: Interpreter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    known = _known(mode, args[0])
    if known is not None:
        results = func(known, *args[1:], **kwargs)
    else:
        mode.notes.assume("unknown elements are taken as all different")
        results = func(torch.arange(args[0].numel()).view(args[0].shape), *args[1:], **kwargs)
    made = []
    for position, each in enumerate(results):
        made.append(_make(mode, func, each.shape, args[0].dtype if position == 0 else each.dtype))
        if known is not None:
            mode.values.note(made[-1], each)
    return tuple(made)


def _repeat_interleave(mode: Interpreter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    size = kwargs.get("output_size")
    known = _known(mode, args[0])
    if known is not None:
        found = torch.repeat_interleave(known)
        result = _make(mode, func, found.shape, found.dtype)
        mode.values.note(result, found)
        return result
    if size is None:
        mode.notes.assume(f"unknown repeats are taken as {NUMBER} each")
        size = args[0].numel() * NUMBER
    return _make(mode, func, (size,), args[0].dtype)


def _bincount(mode: Interpreter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    known = _known(mode, args[0])
    least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    if known is not None and (len(args) < 2 or args[1] is None):
        found = torch.bincount(known, minlength=least)
        result = _make(mode, func, found.shape, found.dtype)
        mode.values.note(result, found)
        return result
    return _make(mode, func, (max(least, NUMBER),), torch.int64)


def _ctc_loss(mode: Interpreter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_ctc_loss` (LossCTC.cu): a loss a sample, and alpha for twice the longest target and one more."""
    steps, batch, _ = args[0].shape if args[0].dim() == 3 else (args[0].shape[0], 1, 0)
    lengths = args[3]
    if isinstance(lengths, torch.Tensor):
        known = _known(mode, lengths)
        longest = int(known.max()) if known is not None else args[1].shape[-1]
    else:
        longest = max(lengths)
    losses = _make(mode, func, (batch,), args[0].dtype)
    return losses, _make(mode, func, (batch, steps, 2 * longest + 1), args[0].dtype)


def _ctc_loss_backward(mode: Interpreter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _make(mode, func, args[1].shape, args[1].dtype)


def _written_in_place(mode: Interpreter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Autograd's formulas write into zeros that they have just made, but out of place under a dispatch mode
    (`areAnyTensorSubclassLike`, ATen/TensorSubclassLikeUtils.h): here as they do on the device."""
    if torch.is_grad_enabled() or mode.lifetimes.phase != "backward":
        return NotImplemented
    if not mode.lifetimes.is_newest(args[0].untyped_storage(), "zero"):
        return NotImplemented
    mode.run(_IN_PLACE[func], args, kwargs)
    return args[0]


def _unscaled(mode: Interpreter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A gradient scaler's check, which writes in place: all is finite, so `found_inf` stays 0."""
    for gradient in args[0]:
        mode.values.forget(gradient.untyped_storage()._cdata)


def _known(mode: Interpreter, tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if true_device(tensor).type == "cpu" else mode.values.of(tensor)


def _count(mode: Interpreter, mask: torch.Tensor) -> int:
    known = _known(mode, mask)
    if known is not None:
        return int(known.count_nonzero())
    mode.notes.assume("every element of an unknown mask is taken as true")
    everything: int = mask.numel()
    return everything


def _make(mode: Interpreter, func: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor on the device, as the result of `func`."""
    with kernel():
        made = torch.empty(shape, dtype=dtype, device=META)
    result = as_device(made, CUDA)
    mode.lifetimes.see(result.untyped_storage(), func._schema.name)
    return result


_IN_PLACE: Final[dict[Any, Any]] = {
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.put.default: aten.put_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}

Rule = Callable[["Interpreter", Any, tuple[Any, ...], dict[str, Any]], Any]

RULES: Final[dict[Any, Rule]] = {
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim.default: _unique,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.bincount.default: _bincount,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
    **dict.fromkeys(_IN_PLACE, _written_in_place),
}
