"""Stand-ins for workers of reinforcement-learning frameworks: their attributes, methods and order of calls.

They use a CPU as the device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn


class FlatBuffer:
    """As Megatron's `_ParamAndGradBuffer`: parameters and gradients are views of two flat tensors."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        total = sum(parameter.numel() for parameter in parameters)
        self.param_data = torch.empty(total)
        self.grad_data = torch.zeros(total)
        self.calls: list[tuple[str, bool, bool]] = []
        self._size = self.grad_data.untyped_storage().nbytes()
        at = 0
        for parameter in parameters:
            view = self.param_data[at : at + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.main_grad = self.grad_data[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()

    def offload_to_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        self.calls.append(("offload", move_params, move_grads))
        if move_grads:
            self.grad_data.untyped_storage().resize_(0)

    def reload_from_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        self.calls.append(("reload", move_params, move_grads))
        if move_grads:
            self.grad_data.untyped_storage().resize_(self._size)
            self.grad_data.zero_()


class Rotary(nn.Module):
    """As Megatron's `RotaryEmbedding`: a method with a cache of tensors."""

    @functools.lru_cache(maxsize=32)  # noqa: B019
    def forward(self, length: int) -> Tensor:
        return torch.arange(float(length)).cos()


class MegatronDDP(nn.Module):
    """As Megatron's `DistributedDataParallel`: `buffers` is a list and hides the method of that name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.buffers = [FlatBuffer(list(module.parameters()))]
        self.expert_parallel_buffers: list[FlatBuffer] = []

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


class MegatronOptimizer:
    """As Megatron's optimizer with float32 masters, over a `torch.optim.Optimizer`."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.masters = [parameter.detach().clone() for parameter in parameters]
        self.shard_fp32_from_float16_groups = [self.masters]
        self.model_float16_groups = [parameters]
        self.optimizer = torch.optim.Adam(self.masters)

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.model_float16_groups[0], strict=True):
            master.grad = parameter.main_grad.clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for master, parameter in zip(self.masters, self.model_float16_groups[0], strict=True):
            parameter.data.copy_(master)


class MegatronPolicyWorker:
    """As NeMo-RL's."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        self.model: Any = MegatronDDP(module)
        self.optimizer = MegatronOptimizer(list(module.parameters()))
        self.calls: list[str] = []

    def train_step(self) -> float:
        loss = self.model(torch.ones(2, 8)).square().mean()
        loss.backward()
        for parameter in self.model.parameters():
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
        self.optimizer.step()
        return loss.item()

    def prepare_for_training(self) -> None:
        self.model = self.move_model(self.model, "cuda", move_grads=True, move_params=True)
        self.model.train()
        self.move_optimizer("cuda")

    def offload_before_refit(self) -> None:
        self.calls.append("before")
        self.model = self.move_model(self.model, "cpu", move_params=False, move_grads=True)
        self.move_optimizer("cpu")

    def offload_after_refit(self) -> str:
        self.calls.append("after")
        self.model = self.move_model(self.model, "cpu")
        self.model.eval()
        self.offload_before_refit()
        return "done"

    def move_model(self, model: Any, device: str, move_params: bool = True, move_grads: bool = True) -> Any:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            way = buffer.offload_to_cpu if device == "cpu" else buffer.reload_from_cpu
            way(move_params=move_params, move_grads=move_grads)
        return model

    def move_optimizer(self, device: str) -> None:
        self.calls.append(f"optimizer to {device}")


class DTensorPolicyWorker:
    """As NeMo-RL's other one: FSDP2, with moves of its own names."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Linear(8, 8)
        self.optimizer: torch.optim.Optimizer | None = torch.optim.Adam(self.model.parameters())
        self.calls: list[str] = []

    def offload_before_refit(self) -> None:
        self.move_optimizer_to_device("cpu")

    def offload_after_refit(self) -> None:
        self.model = self.move_to_cpu(self.model)
        self.offload_before_refit()

    def prepare_for_training(self) -> None:
        self.model = self.move_to_cuda(self.model)
        self.move_optimizer_to_device("cuda")

    def move_to_cpu(self, model: nn.Module) -> nn.Module:
        self.calls.append("model to cpu")
        return model

    def move_to_cuda(self, model: nn.Module) -> nn.Module:
        self.calls.append("model to cuda")
        return model

    def move_optimizer_to_device(self, device: str) -> None:
        self.calls.append(f"optimizer to {device}")


class VerlEngine:
    """As an engine of verl."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool, bool, bool]] = []

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        self.calls.append((device, model, optimizer, grad))


class SlimeActor:
    """As a train actor of slime."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def sleep(self) -> None:
        self.events.append("pause")

    def wake_up(self) -> None:
        self.events.append("resume")
