"""`OffloadedAdamW`: AdamW whose state lives on the host at 12 bytes per parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from memtriage.treat.offload import checkpoint
from memtriage.treat.offload.bucket import Bucket, own_parts, with_gradients
from memtriage.treat.offload.engine import Engine
from memtriage.treat.offload.exchange import Exchange, clip_factor, total_norm
from memtriage.treat.offload.kernel import Scaling, hyper_of
from memtriage.treat.offload.native.choice import Kernel
from memtriage.treat.offload.overlap import OverlapBackward
from memtriage.treat.offload.pipeline import weak_callback
from memtriage.treat.offload.resident import ResidentParameter
from memtriage.treat.offload.resources import OptimizerResources
from memtriage.treat.offload.settings import (
    RING_DEPTH,
    TILE_ELEMENTS,
    Gradients,
    OffloadSettings,
    check_group,
)
from memtriage.treat.offload.tiles import WIDE, capacity


class OffloadedAdamW(Optimizer):  # type: ignore[misc]
    """AdamW for parameters on a GPU, with its state and its arithmetic on the host.

    The host keeps a float32 master of each weight and two float32 moments: 12 bytes per parameter, plus the
    ring of pinned tiles (64 MiB by default). Gradients come down tile by tile; one pass over each tile does
    the operations of torch's fused CPU kernel; the new weights, masters rounded to nearest even, go up. Given
    the same gradients, masters are bit for bit the weights of `torch.optim.AdamW(fused=True)` on float32 CPU
    parameters.

    Masters are taken from the weights at the first step. If something else writes to the weights later (a
    loaded checkpoint), the new values are taken over at the next step.

    Args:
        params: as for every optimizer: tensors, groups, or named ones. bfloat16, float16 or float32, on CUDA
            devices or the CPU, plain or `DTensor` (FSDP2), whose local shard is stepped.
        lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`; `lr` may be a tensor.
        amsgrad: must be False.
        state_dtype: `torch.bfloat16` halves the moments (8 bytes per parameter); they are rounded to nearest
            after each step.
        gradients: `"device"` leaves gradients where backward puts them. `"host"` adds them up on the host in
            float32 (4 bytes per parameter more) and sets `.grad` to None: at `step()`, at
            `offload_gradients()`, or in backward with `overlap_backward`.
        overlap_backward: take each gradient as soon as backward has finished it. With `gradients="device"`
            the host steps that parameter at once, and `step()` only sends the weights up: use `accumulate()`
            around all but the last backward of a step. `.grad` is None afterwards.
        max_norm: clip gradients to this global 2-norm, in float32; `grad_norm` has the norm before clipping.
        process_group: partition state and work over its ranks as ZeRO does. Gradients are averaged over the
            ranks, unless `reduce_gradients` is False because something else (DDP) has done so.
        reduce_gradients: see above. Averaging twice only costs time.
        tile_elements: elements per tile of bfloat16 or float16, a multiple of 64; float32 takes half as many.
        ring_depth: number of tiles in the ring.
        pin_memory: whether to page-lock the ring if a CUDA device is used.
        kernel: `"compiled"` does all in one pass over a tile. The system's compiler builds it at first use,
            the user's cache keeps it, and each process checks that its results equal torch's bit for bit
            before using it. `"torch"` is torch's own kernels: the same results, more slowly. `"auto"` is the
            compiled kernel if it can be built.

    Attributes:
        grad_norm: norm of the last step's gradients, with `max_norm`; else None.
        pinned: whether the ring is page-locked.
        compiled: whether the compiled kernel is used.
        host_bytes: host memory reserved: state (which the system commits as it is first written) and ring.

    Raises:
        ValueError: a setting cannot be used; the text names it.
        TypeError: parameters have other types.
        MemoryError: the system refuses the host memory.
        RuntimeError: `kernel="compiled"` is not available; the text says why.

    Limits: complex and sparse gradients are refused. NaN and infinite gradients do what they do in
    `torch.optim.AdamW`: they reach the weights, unless a `GradScaler` skips the step. A write through
    `parameter.data` is not noticed. Not for CUDA graph capture.
    """

    _step_supports_amp_scaling = True  # GradScaler hands over grad_scale and found_inf instead of unscaling

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype = torch.float32,
        gradients: Gradients = "device",
        overlap_backward: bool = False,
        max_norm: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        reduce_gradients: bool = True,
        tile_elements: int = TILE_ELEMENTS,
        ring_depth: int = RING_DEPTH,
        pin_memory: bool = True,
        kernel: Kernel = "auto",
    ) -> None:
        settings = OffloadSettings(
            state_dtype=state_dtype,
            gradients=gradients,
            overlap_backward=overlap_backward,
            max_norm=max_norm,
            reduce_gradients=reduce_gradients,
            tile_elements=tile_elements,
            ring_depth=ring_depth,
            pin_memory=pin_memory,
            kernel=kernel,
        )
        settings.check(partitioned=process_group is not None)
        self._settings = settings
        several = process_group is not None and dist.get_world_size(process_group) > 1
        self._exchange = Exchange(process_group, tile_elements) if several else None
        self._resources = OptimizerResources(settings, self._exchange)
        self._overlap = OverlapBackward(self._resources, weak_callback(self._sync_state))
        self.grad_norm: Tensor | None = None
        # The last five choose an implementation in torch, so that torch can load a state saved here.
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": True,
            "decoupled_weight_decay": True,
        }
        super().__init__(params, defaults)

    @property
    def pinned(self) -> bool:
        return bool(self._resources.pinned)

    @property
    def compiled(self) -> bool:
        return bool(self._resources.compiled)

    @property
    def host_bytes(self) -> int:
        return int(self._resources.host_bytes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in every optimizer; its host memory is reserved now.

        Raises:
            ValueError, TypeError, MemoryError: as the constructor; no group is added then.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            names = group.get("param_names") or [
                f"parameter {index} of group {len(self.param_groups) - 1}"
                for index in range(len(group["params"]))
            ]
            new = self._resources.admit(group["params"], names)
        except BaseException:
            self.param_groups.pop()
            raise
        if self._settings.overlap_backward:
            self._overlap.follow(new, len(self.param_groups) - 1, group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step for every parameter that has a gradient; returns what `closure` returned, or None.

        Everything is checked before anything changes. If a device fails in the middle, the error is raised,
        and the optimizer refuses to step until `load_state_dict` has loaded a whole state.

        Raises:
            RuntimeError: gradients or parameters cannot be used; nothing has changed then. Also after
                `close()`, or after a step that failed in the middle.
        """
        self._resources.check_usable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._advance()
        return loss

    def _advance(self) -> None:
        self._overlap.wait()
        scale, skip = self._loss_scaling()
        if self._settings.gradients == "host":
            self._collect()
            members = [
                (group, resident, None) for group, resident in self._members() if resident.has_gradient
            ]
            buckets = self._resources.buckets(members, reduced=True)
        else:
            traveling = with_gradients(self._members(), self._exchange)
            buckets = self._resources.buckets(
                traveling, reduced=self._exchange is None or not self._settings.reduce_gradients
            )
        if skip:
            return
        late = self._resources.buckets(
            [(group, resident, None) for group, resident in self._overlap.stepped], reduced=True
        )
        hypers = [hyper_of(group) for group in self.param_groups]
        self._adopt(buckets)
        scaling = self._scaling(buckets, scale)
        self._resources.run(
            buckets, lambda engine, bucket: engine.step(bucket, hypers[bucket.group], scaling)
        )
        self._resources.run(late, Engine.upload)
        self._overlap.stepped.clear()
        for bucket in buckets + late:
            for resident in bucket.residents:
                resident.saw()

    def offload_gradients(self) -> None:
        """With `gradients="host"`: add the device's gradients to the host's now, and set `.grad` to None.

        For micro-batches: call it after each backward to free the device's memory. With a process group, all
        ranks must call it.

        Raises:
            RuntimeError: with `gradients="device"`, and as `step`.
        """
        self._resources.check_usable()
        if self._settings.gradients != "host":
            raise RuntimeError('offload_gradients() needs OffloadedAdamW(..., gradients="host")')
        self._overlap.wait()
        self._collect()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in this block only add up gradients and step no parameter.

        Needed around all but the last micro-batch of a step with `overlap_backward` and gradients on the
        device; otherwise it has no effect.
        """
        with self._overlap.paused():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, including those on the host.

        Raises:
            RuntimeError: `overlap_backward` has already stepped with them.
        """
        self._overlap.wait()
        if self._overlap.stepped:
            raise RuntimeError(
                f"overlap_backward has already stepped {len(self._overlap.stepped)} parameters on the host, "
                "during the last backward pass: call step() to complete the step"
            )
        for resident in self._resources.residents.values():
            resident.has_gradient = False
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state in the layout of `torch.optim.AdamW`, as views of the host memory: nothing is copied.

        Each parameter that has been stepped has `step`, `exp_avg` and `exp_avg_sq`; unless its weights are
        float32, also `master` (float32), which torch's AdamW keeps but does not use. With a process group the
        tensors are this rank's part, one-dimensional, and `partition` says which; for the whole see
        `full_state_dict`.

        Raises:
            RuntimeError: as `step`; and between a backward with `overlap_backward` and its `step()`.
        """
        self._resources.check_usable()
        self._overlap.wait()
        if self._overlap.stepped:
            raise RuntimeError("the backward pass has done a part of a step: call step() first")
        state: dict[str, Any] = super().state_dict()
        if self._exchange is not None:
            state[checkpoint.PARTITION] = {"rank": self._exchange.rank, "ranks": self._exchange.ranks}
        return state

    def full_state_dict(self, to: int | None = 0) -> dict[str, Any]:
        """`state_dict` with whole tensors, gathered one by one; all ranks of the group must call it.

        Args:
            to: the rank (in the group) that receives it and needs the host memory; None for all. The other
                ranks get an empty dict.
        """
        state = self.state_dict()
        if self._exchange is None:
            return state
        exchange = self._exchange
        keep = to is None or to == exchange.rank
        order = [parameter for group in self.param_groups for parameter in group["params"]]
        slot = self._resources.engine.ring.slots[0]
        whole: dict[int, dict[str, Tensor]] = {}
        for index in sorted(state["state"]):
            resident = self._resources.residents[order[index]]
            lane = self._resources.lane(resident.weights().device)
            lane.follow(lane.record_event())
            whole[index] = checkpoint.gathered_entry(
                resident, exchange, lane, slot, capacity(self._settings.tile_elements, WIDE), keep=keep
            )
        return {"state": whole, "param_groups": state["param_groups"]} if keep else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a state of this class or of `torch.optim.AdamW`, tensor by tensor, into the existing memory.

        Every rank of a process group can load whole tensors; only the rank that saved it can load a
        partitioned state. At the next step a weight on the device replaces its `master` if that does not
        round to it, so model and optimizer can be loaded in either order. Without a `master` the weight is
        taken.

        Raises:
            ValueError: when the state does not fit; nothing has changed then.
        """
        self._resources.check_open()
        self._overlap.wait()
        given = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, given)
            given = given if changed is None else changed
        partitioned = checkpoint.check_partition(given, self._exchange)
        groups, parameters = checkpoint.matched_groups(self.param_groups, given["param_groups"])
        unknown = [key for key in given["state"] if key not in parameters]
        if unknown:
            raise ValueError(f"the loaded state is of parameters that no group has: {unknown}")
        entries = {
            self._resources.residents[parameters[key]]: entry
            for key, entry in given["state"].items()
            if entry
        }
        for resident, entry in entries.items():
            resident.check(entry, partitioned=partitioned)
        for group in groups:
            check_group(group)
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(loaded)
        self.state.clear()
        self._overlap.stepped.clear()
        with torch.no_grad():
            for resident in self._resources.residents.values():
                entry = entries.get(resident)
                if entry is None:
                    resident.forget()
                    continue
                resident.load(entry, partitioned=partitioned)
                self.state[resident.parameter] = resident.publish()
        self._resources.mended()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def close(self) -> None:
        """Release everything: thread, pinned tiles, hooks, state. Repeatable; called automatically at exit.

        Tensors of an earlier `state_dict` stay valid and keep their memory.
        """
        self._overlap.close()
        self._resources.close()
        self.state.clear()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("OffloadedAdamW holds a thread and mapped memory: save its state_dict() instead")

    # -- what step() is made of

    def _loss_scaling(self) -> tuple[float | None, bool]:
        """The GradScaler's scale to divide by, and whether to skip the step."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is None and found_inf is None:
            return None, False
        if self._settings.gradients == "host" or self._overlap.stepped:
            raise RuntimeError(
                "a GradScaler looks for infinities in gradients on the device, which this optimizer has "
                'already taken: use it with gradients="device" and without overlap_backward'
            )
        skip = bool(found_inf)
        if self._exchange is not None:
            skip = self._exchange.agree([skip], next(iter(self._resources.residents)).device)[0]
        return (None if scale is None else float(scale)), skip

    def _collect(self) -> None:
        traveling = with_gradients(self._members(), self._exchange)
        buckets = self._resources.buckets(
            traveling, reduced=self._exchange is None or not self._settings.reduce_gradients
        )
        self._resources.run(buckets, Engine.collect)
        for _, resident, _ in traveling:
            resident.parameter.grad = None

    def _adopt(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            for resident in bucket.residents:
                self._sync_state(resident)
        unseen = [(b.group, resident, None) for b in buckets for resident in b.residents if resident.unseen()]
        fresh = self._resources.buckets(unseen, reduced=True)
        self._resources.run(fresh, Engine.adopt)

    def _sync_state(self, resident: ResidentParameter) -> None:
        """Make sure that `state` has the tensors that will be stepped: users may clear or replace them."""
        entry = self.state.get(resident.parameter)
        if not resident.published(entry):
            if entry:
                resident.check(entry, partitioned=self._exchange is not None)
                resident.load(dict(entry), partitioned=self._exchange is not None)
            else:
                resident.forget()
        self.state[resident.parameter] = resident.publish()

    def _scaling(self, buckets: list[Bucket], scale: float | None) -> Scaling:
        ranks = 1 if self._exchange is None or not self._settings.reduce_gradients else self._exchange.ranks
        if self._settings.max_norm is None:
            return Scaling(ranks, scale)
        self._resources.run([bucket for bucket in buckets if not bucket.reduced], Engine.reduce)
        norm = total_norm(own_parts(buckets), self._exchange) / ranks
        self.grad_norm = norm if scale is None else norm / scale
        return Scaling(ranks, scale, clip_factor(float(self.grad_norm), self._settings.max_norm))

    # -- small change

    def _members(self) -> Iterator[tuple[int, ResidentParameter]]:
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                yield index, self._resources.residents[parameter]
