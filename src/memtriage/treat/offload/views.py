"""Views of parameters and gradients: this rank's part of a `DTensor`, elements in the order of memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: the shard of a `DTensor`, any other tensor as it is; detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one run of memory without gaps or repetitions, in whatever order."""
    # empty_like keeps the strides of exactly such tensors.
    return bool(torch.empty_like(tensor, device="meta").stride() == tensor.stride())


def memory_order(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor in the order of memory, as a one-dimensional view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def ordered_as(tensor: Tensor, pattern: Tensor) -> Tensor:
    """The elements of `tensor`, of the same shape as `pattern`, in the order in which memory holds `pattern`.

    A view where the strides agree, else of a copy on the same device. `pattern` is dense.
    """
    if tensor.stride() != pattern.stride():
        tensor = torch.empty_strided(
            pattern.shape, pattern.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return memory_order(tensor)


def like_parameter(local_part: Tensor, parameter: Tensor) -> Tensor:
    """Host memory laid out as the local part of `parameter`, as a `DTensor` if the parameter is one."""
    if not isinstance(parameter, DTensor):
        return local_part
    # As FSDP2 does for its own CPU offload: DTensor.from_local would move the shard to the mesh's device.
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(parameter.shape, parameter.stride(), local_part.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    wrapped: Tensor = DTensor(local_part, spec, requires_grad=False)
    return wrapped
