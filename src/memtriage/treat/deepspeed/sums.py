"""Keep the 16-bit sums of micro-batches in the memory of the fp32 gradients.

With gradient accumulation DeepSpeed keeps a 16-bit sum for each parameter in addition to its fp32 gradient.
The fp32 gradient is written once per step, after the last reading of the sum. Until then its memory is idle,
and twice as large as the sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

Method = Callable[..., Any]


class SumsLost(RuntimeError):
    """A 16-bit sum and its fp32 gradient share memory, and one was needed after the other had overwritten it.

    Raised before the optimizer steps. The gradients of this step are lost; weights and states are as after
    the step before.
    """


class SharedSums:
    """Makes the sums views of the fp32 gradients, and checks that neither is read as the other.

    A parameter of which this rank's partition has less than half keeps a separate sum.
    """

    def __init__(self, knows: Callable[[Any], bool]) -> None:
        self._knows = knows
        self._windows: weakref.WeakKeyDictionary[Any, _Window] = weakref.WeakKeyDictionary()

    def accumulating(self, original: Method, optimizer: Any, param: Any) -> Any:
        """In place of `async_accumulate_grad_in_cpu_via_gpu`."""
        if self._knows(optimizer) and not optimizer.low_precision_master_weights_and_grads:
            self._window(optimizer).admit(optimizer, param)
        return original(optimizer, param)

    def finishing(self, original: Method, optimizer: Any, param: Any) -> Any:
        """In place of `async_inplace_copy_grad_to_fp32_buffer_from_gpu`."""
        if self._knows(optimizer):
            self._window(optimizer).finished.add(optimizer.get_param_id(param))
        return original(optimizer, param)

    def before_step(self, optimizer: Any) -> None:
        """Check that all sums that were begun have become gradients.

        Raises:
            SumsLost: some have not.
        """
        window = self._windows.get(optimizer)
        if window is None:
            return
        left = (window.shared & optimizer._offload_accumulated_param_ids) - window.finished
        window.finished.clear()
        if left:
            raise SumsLost(
                f"{len(left)} parameters had gradients in earlier micro-batches of this step and none in the "
                "last, so their fp32 gradients were never written. DeepSpeed would take those of the step "
                "before; their memory holds the sums. Train without share_gradient_sums=True"
            )

    def undo(self, accelerator: Any) -> None:
        """Give the sums of living optimizers separate memory again, with their values."""
        for optimizer, window in list(self._windows.items()):
            sums = optimizer.accumulated_grads_in_cpu
            for param_id in window.shared & sums.keys():
                own = sums[param_id].clone()
                sums[param_id] = accelerator.pin_memory(own) if optimizer.cpu_offload_pin_memory else own
        self._windows.clear()

    def _window(self, optimizer: Any) -> _Window:
        return self._windows.setdefault(optimizer, _Window())


class _Window:
    """One optimizer's sums from step to step.

    Attributes:
        shared: ids of the parameters whose sums are in their fp32 gradients.
        finished: ids of those whose fp32 gradient was written since the last step.
    """

    def __init__(self) -> None:
        self.shared: set[int] = set()
        self.finished: set[int] = set()

    def admit(self, optimizer: Any, param: Any) -> None:
        """Prepare for a gradient to be added to its parameter's sum.

        Raises:
            SumsLost: the sum has been overwritten.
        """
        param_id = optimizer.get_param_id(param)
        sums = optimizer.accumulated_grads_in_cpu
        further = optimizer.micro_step_id > 0
        if param_id not in sums:
            group, _, first, count = optimizer.grad_position[param_id]
            whole: Tensor = optimizer.single_partition_of_fp32_groups[group].grad.view(-1)
            room = whole.narrow(0, first, count).view(param.dtype)
            own = room[: param.numel()] if room.numel() >= param.numel() else None
            if own is None:
                return
            if further:
                own.zero_()  # DeepSpeed's own new sum begins at zero, too
            sums[param_id] = own
            self.shared.add(param_id)
        elif param_id in self.shared and further and not self._holds(optimizer, param_id):
            raise SumsLost(
                "a parameter has a gradient whose sum of earlier micro-batches is overwritten: it was unused "
                "in the first micro-batch of this step, or used again after the last. Train without "
                "share_gradient_sums=True"
            )

    def _holds(self, optimizer: Any, param_id: int) -> bool:
        """Whether a shared sum is the current sum of this step."""
        return param_id in optimizer._offload_accumulated_param_ids and param_id not in self.finished
