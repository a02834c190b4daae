"""Sums of micro-batches in the fp32 gradients: the same gradients, and no sum read as something else."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from memtriage.treat.deepspeed.sums import SharedSums, SumsLost

COUNTS = (40, 24, 70)
"""Elements of three parameters; this rank has all of the first two and the first 30 of the third."""

PARTITION = 94


class Optimizer:
    """DeepSpeed's accumulation on the CPU, without devices: what is shared must not be noticed by it."""

    low_precision_master_weights_and_grads = False
    cpu_offload_pin_memory = True

    def __init__(self) -> None:
        self.params = [torch.zeros(count, dtype=torch.bfloat16) for count in COUNTS]
        master = torch.zeros(PARTITION)
        master.grad = torch.zeros(PARTITION)
        self.single_partition_of_fp32_groups = [master]
        self.grad_position = {0: [0, 0, 0, 40], 1: [0, 0, 40, 24], 2: [0, 0, 64, 30]}
        self.accumulated_grads_in_cpu: dict[int, torch.Tensor] = {}
        self._offload_accumulated_param_ids: set[int] = set()
        self.micro_step_id = -1

    def get_param_id(self, param: torch.Tensor) -> int:
        return next(number for number, one in enumerate(self.params) if one is param)

    def accumulate(self, param: torch.Tensor) -> None:
        number = self.get_param_id(param)
        if number not in self.accumulated_grads_in_cpu:
            self.accumulated_grads_in_cpu[number] = torch.zeros(param.numel(), dtype=param.dtype)
        if self.micro_step_id > 0:
            param.grad += self.accumulated_grads_in_cpu[number]
        self.accumulated_grads_in_cpu[number].copy_(param.grad)

    def finish(self, param: torch.Tensor) -> None:
        _, source, first, count = self.grad_position[self.get_param_id(param)]
        master = self.single_partition_of_fp32_groups[0].grad
        master[first : first + count].copy_(param.grad[source : source + count].float())


class Trainer:
    def __init__(self, *, share: bool) -> None:
        self.optimizer = Optimizer()
        self.sums = SharedSums(lambda optimizer: share)
        self.accumulate = partial(self.sums.accumulating, Optimizer.accumulate)
        self.finish = partial(self.sums.finishing, Optimizer.finish)
        self.generator = torch.Generator().manual_seed(0)

    def micro_batch(self, *, last: bool, used: tuple[int, ...] = (0, 1, 2)) -> None:
        self.optimizer.micro_step_id += 1
        for number in used:
            self.backward(number, last=last)

    def backward(self, number: int, *, last: bool) -> None:
        param = self.optimizer.params[number]
        param.grad = torch.randn(param.numel(), generator=self.generator).bfloat16()
        self.accumulate(self.optimizer, param)
        self.optimizer._offload_accumulated_param_ids.add(number)
        if last:
            self.finish(self.optimizer, param)

    def step(self) -> torch.Tensor:
        self.sums.before_step(self.optimizer)
        self.optimizer.micro_step_id = -1
        self.optimizer._offload_accumulated_param_ids = set()
        gradient: torch.Tensor = self.optimizer.single_partition_of_fp32_groups[0].grad.clone()
        return gradient


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_the_gradients_are_those_of_sums_apart(micro_batches: int) -> None:
    plain, sharing = Trainer(share=False), Trainer(share=True)
    for _ in range(3):
        for trainer in (plain, sharing):
            for number in range(micro_batches):
                trainer.micro_batch(last=number == micro_batches - 1)
        expected, found = plain.step(), sharing.step()
        assert expected.any()
        assert torch.equal(expected, found)


def test_sums_lie_in_the_gradients_where_they_fit() -> None:
    trainer = Trainer(share=True)
    trainer.micro_batch(last=False)
    gradient = trainer.optimizer.single_partition_of_fp32_groups[0].grad
    sums = trainer.optimizer.accumulated_grads_in_cpu
    assert [sums[number].data_ptr() - gradient.data_ptr() for number in (0, 1)] == [0, 160]
    assert [sums[number].numel() for number in (0, 1, 2)] == [40, 24, 70]
    # 30 elements in fp32 have room for 60 of the third's 70.
    assert sums[2].untyped_storage().data_ptr() != gradient.untyped_storage().data_ptr()


def test_parameter_new_in_the_second_micro_batch_begins_at_zero() -> None:
    plain, sharing = Trainer(share=False), Trainer(share=True)
    for trainer in (plain, sharing):
        trainer.micro_batch(last=False, used=(0,))
        trainer.micro_batch(last=True, used=(0, 1))
    assert torch.equal(plain.step(), sharing.step())


def test_a_sum_that_never_became_a_gradient_is_not_stepped_with() -> None:
    trainer = Trainer(share=True)
    trainer.micro_batch(last=False)
    trainer.micro_batch(last=True, used=(0, 2))
    with pytest.raises(SumsLost, match="1 parameters had gradients in earlier micro-batches"):
        trainer.step()


def test_a_sum_of_the_step_before_is_not_added_to() -> None:
    trainer = Trainer(share=True)
    trainer.micro_batch(last=False)
    trainer.micro_batch(last=True)
    trainer.step()
    trainer.micro_batch(last=False, used=(0,))
    with pytest.raises(SumsLost, match="unused in the first micro-batch"):
        trainer.micro_batch(last=True, used=(0, 1))


def test_a_gradient_is_not_read_as_a_sum() -> None:
    trainer = Trainer(share=True)
    trainer.micro_batch(last=False)
    trainer.micro_batch(last=True)
    trainer.optimizer.micro_step_id += 1
    with pytest.raises(SumsLost, match="used again after the last"):
        trainer.backward(0, last=True)


def test_undone_in_the_middle_of_a_step_the_sums_are_kept() -> None:
    plain, sharing = Trainer(share=False), Trainer(share=True)
    for trainer in (plain, sharing):
        trainer.micro_batch(last=False)
    accelerator: Any = Mock(pin_memory=Mock(side_effect=lambda tensor: tensor))
    sharing.sums.undo(accelerator)
    sharing.accumulate, sharing.finish = Optimizer.accumulate, Optimizer.finish
    assert accelerator.pin_memory.call_count == 2
    for trainer in (plain, sharing):
        trainer.micro_batch(last=True)
    assert torch.equal(plain.step(), sharing.step())
