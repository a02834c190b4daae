"""The optimizer, its gradients, and the moves between GPU and host that Megatron-style workers make."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from memtriage.treat.offload.pinned import host_memory, locked_memory

_ALIGNMENT: Final = 256
"""Bytes; each storage begins at a multiple of it in the host copy."""


class Gradients:
    """All gradients in one fp32 buffer, as Megatron's `_ParamAndGradBuffer`: gone by `resize_(0)`, then zero.

    Each micro-batch's gradients are added to it when they are ready.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        total = sum(parameter.numel() for parameter in self._parameters)
        self.buffer = torch.zeros(total, dtype=torch.float32, device=self._parameters[0].device)
        self._nbytes = self.buffer.untyped_storage().nbytes()
        start = 0
        for parameter in self._parameters:
            end = start + parameter.numel()
            parameter.decoupled_grad = self.buffer[start:end].view_as(parameter)
            parameter.register_post_accumulate_grad_hook(_add_to_view)
            start = end
        self.release()

    def restore(self) -> None:
        """Bring the buffer back, all zero."""
        self.buffer.untyped_storage().resize_(self._nbytes)
        self.buffer.zero_()

    def release(self) -> None:
        """Give the buffer's memory back; its values are gone."""
        self.buffer.untyped_storage().resize_(0)


def _add_to_view(parameter: Tensor) -> None:
    parameter.decoupled_grad.add_(parameter.grad)
    parameter.grad = None


class MasterAdamW(torch.optim.Optimizer):
    """AdamW with fp32 states and fp32 master weights, made in the first step: 12 bytes per parameter.

    TransformerEngine's `FusedAdam` in plain torch; its master weights take 2 bytes less.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step with the gradients in `decoupled_grad`."""
        for group in self.param_groups:
            weights = group["params"]
            states = [self.state[weight] or self._begin(weight) for weight in weights]
            masters = [state["master_param"] for state in states]
            adamw(
                masters,
                [weight.decoupled_grad for weight in weights],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=1e-8,
                maximize=False,
            )
            torch._foreach_copy_(weights, masters)

    def _begin(self, weight: Tensor) -> dict[str, Tensor]:
        state = self.state[weight]
        state["exp_avg"] = torch.zeros_like(weight, dtype=torch.float32)
        state["exp_avg_sq"] = torch.zeros_like(weight, dtype=torch.float32)
        state["master_param"] = weight.detach().to(torch.float32, copy=True)
        state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
        return state


def make_optimizer(library: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with fp32 states.

    TransformerEngine's keeps the fp32 master weight as the bf16 parameter and an int16 remainder, Megatron's
    default.
    """
    if library == "te":
        optimizers = importlib.import_module("transformer_engine.pytorch.optimizers")
        return optimizers.FusedAdam(
            parameters,
            lr=1e-5,
            weight_decay=0.01,
            master_weights=True,
            store_param_remainders=True,
            use_decoupled_grad=True,
        )
    return MasterAdamW(parameters, lr=1e-5, weight_decay=0.01)


class Offload:
    """Moves storages to the host and back, the tensors keeping their identity (`storage().resize_`).

    One run of host memory holds them all; it is made at the first move, because optimizer states exist only
    after the first step.

    Args:
        make_host: makes so many bytes of host memory.
    """

    def __init__(self, make_host: Callable[[int], Tensor]) -> None:
        self._make_host = make_host
        self._host: Tensor | None = None
        self._moved: list[tuple[torch.UntypedStorage, torch.device, Tensor]] = []

    def to_host(self, tensors: Iterable[Tensor]) -> None:
        """Copy the storages of CUDA tensors to the host and give their device memory back."""
        if self._moved:
            raise RuntimeError("to_host was called twice without to_device")
        # By the tensor's device: where a trace plays CUDA, the storage has none.
        gradients = {
            tensor.untyped_storage().data_ptr(): (tensor.untyped_storage(), tensor.device)
            for tensor in tensors
            if tensor.device.type == "cuda"
        }
        sizes = [_aligned(storage.nbytes()) for storage, _ in gradients.values()]
        if not sizes:
            return
        if self._host is None or self._host.numel() < sum(sizes):
            self._host = self._make_host(sum(sizes))
        start = 0
        for (storage, device), size in zip(gradients.values(), sizes, strict=True):
            copy = self._host[start : start + storage.nbytes()]
            copy.copy_(_bytes_of(storage, device), non_blocking=True)
            self._moved.append((storage, device, copy))
            start += size
        torch.cuda.synchronize()
        for storage, _, _ in self._moved:
            storage.resize_(0)

    def to_device(self) -> None:
        """Bring everything back."""
        for storage, device, copy in self._moved:
            storage.resize_(copy.numel())
            _bytes_of(storage, device).copy_(copy, non_blocking=True)
        self._moved.clear()


def pinned(nbytes: int) -> Tensor:
    """Page-locked host memory of exactly this size; plain where the driver refuses."""
    locked = locked_memory(nbytes)
    return host_memory(nbytes) if locked is None else locked


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What an optimizer keeps for its parameters."""
    return [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    ]


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
