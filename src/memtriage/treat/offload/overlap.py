"""Take each gradient during backward, as soon as it is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from memtriage.treat.offload.bucket import Bucket
from memtriage.treat.offload.engine import Engine
from memtriage.treat.offload.kernel import Scaling, hyper_of
from memtriage.treat.offload.pipeline import weak_callback
from memtriage.treat.offload.resident import ResidentParameter
from memtriage.treat.offload.resources import OptimizerResources


class OverlapBackward:
    """The hooks on parameters, and the work that they have started.

    Attributes:
        stepped: parameters (with their group's index) that the host has stepped since the last `step()`. The
            new weights have not gone up yet, because backward may still need the old ones.
    """

    def __init__(self, resources: OptimizerResources, prepare: Callable[[ResidentParameter], None]) -> None:
        """`prepare` is called, in backward's thread, before a parameter is stepped."""
        self.stepped: list[tuple[int, ResidentParameter]] = []
        self._resources = resources
        self._prepare = prepare
        self._steps = resources.settings.gradients == "device"
        self._paused = False
        self._groups: dict[ResidentParameter, tuple[int, dict[str, Any]]] = {}
        self._hooks: list[Any] = []
        self._under_way: list[Future[None]] = []

    def follow(self, residents: Sequence[ResidentParameter], index: int, group: dict[str, Any]) -> None:
        """Hook the parameters of a group."""
        hook = weak_callback(self._on_gradient)
        for resident in residents:
            self._groups[resident] = (index, group)
            if resident.parameter.requires_grad:
                self._hooks.append(resident.parameter.register_post_accumulate_grad_hook(hook))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In this block, gradients on the device are not stepped with, but add up."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def wait(self) -> None:
        """Wait until all started work is done; raise its error, if any."""
        futures, self._under_way = self._under_way, []
        for future in futures:
            future.result()

    def close(self) -> None:
        """Remove the hooks, wait, and forget. Repeatable."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for future in self._under_way:
            future.exception()
        self._under_way.clear()
        self._groups.clear()
        self.stepped.clear()

    def _on_gradient(self, parameter: Tensor) -> None:
        self._resources.check_usable()
        check_not_replicated(parameter)
        resident = self._resources.residents[parameter]
        if any(other is resident for _, other in self.stepped):
            raise RuntimeError(
                f"{resident.name} got a second gradient before step(), after overlap_backward had used the "
                "first: put `with optimizer.accumulate():` around all but the last backward of a step"
            )
        if self._paused and self._steps:
            return
        index, group = self._groups[resident]
        bucket = self._resources.buckets([(index, resident, resident.device_gradient())], reduced=True)[0]
        work: Callable[[Engine, Bucket], None] = Engine.collect
        if self._steps:
            self._prepare(resident)
            work = self._step_with(group)
            self.stepped.append((index, resident))
        # The bucket holds the gradient until it has been copied.
        parameter.grad = None
        self._under_way.append(self._resources.submit(bucket, work))

    def _step_with(self, group: dict[str, Any]) -> Callable[[Engine, Bucket], None]:
        hyper = hyper_of(group)

        def work(engine: Engine, bucket: Bucket) -> None:
            if bucket.residents[0].unseen():
                engine.adopt(bucket)
            engine.step(bucket, hyper, Scaling(), upload=False)

        return work


def check_not_replicated(parameter: Tensor) -> None:
    """Raise RuntimeError if a parameter's gradient may not have been averaged yet when hooks run."""
    # DDP reduces gradients after the hooks of their parameters have run.
    if not isinstance(parameter, DTensor) and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            "overlap_backward cannot be used with plain parameters on several ranks: their gradients are not "
            "averaged yet when backward hands them over. Use FSDP2 (DTensor), or process_group without it"
        )
