"""Modules that look like DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def make_accelerator(name: str = "cuda") -> Any:
    class Accelerator:
        def device_name(self) -> str:
            return name

        def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
            return tensor.new_empty(shape)

        def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
            return self._torch_pin_memory(tensor)

    return Accelerator()


def make_optimizer(accelerator: Any) -> Any:
    class DeepSpeedZeroOptimizer:
        cpu_offload_pin_memory = True

        def __init__(self, count: int, *, cpu_offload: bool = True) -> None:
            self.cpu_offload = cpu_offload
            self.masters = accelerator.pin_memory(torch.ones(count))
            self.on_device = torch.zeros(count, dtype=torch.bfloat16)
            self.param_buffer_of_bit16_for_cpu_offload_groups = [torch.zeros(count, dtype=torch.bfloat16)]
            self.temp_grad_buffer_for_cpu_offload = torch.zeros(count, dtype=torch.bfloat16)
            self.initialize_optimizer_states()

        def initialize_optimizer_states(self) -> None:
            self.gradients = accelerator.pin_memory(torch.zeros_like(self.masters))

        def step(self, closure: Any = None) -> None:
            self.masters.mul_(1.25)
            buffer = self.param_buffer_of_bit16_for_cpu_offload_groups[0]
            buffer.data.copy_(self.masters.data)
            self.on_device.data.copy_(buffer.data, non_blocking=True)

        def _unpin_offload_buffers(self) -> None:
            self.temp_grad_buffer_for_cpu_offload, self.param_buffer_of_bit16_for_cpu_offload_groups = (
                None,
                [],
            )

    return DeepSpeedZeroOptimizer


Install = Callable[..., tuple[Any, Any]]
