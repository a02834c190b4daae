"""Optimizers: a step without a temporary copy of the weights; Adam with smaller states on the device.

Its states are of 8 bits, or none at all because they are on the host. Both are simulated by stand-ins that
allocate what the real ones do, because the libraries' steps run their own kernels, or on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from memtriage.model.units import size
from memtriage.planning.changes import Change, Rung
from memtriage.planning.facts import Facts, inner_optimizer
from memtriage.prediction.build import Built, parameters_of

# bitsandbytes/optim/optimizer.py (Optimizer2State): `min_8bit_size`, and the block size of blockwise states.
SMALLEST_8BIT: Final = 4096
BLOCK: Final = 256

HOST_BYTES: Final = 12
"""Bytes of host memory a parameter that OffloadedAdamW takes: a float32 master and two float32 moments."""


def _eight_bit_states(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The states of bitsandbytes' blockwise Adam."""
    if hasattr(parameter, "to_local"):  # of a sharded parameter, those of this rank's part
        parameter = parameter.to_local()
    if parameter.numel() < SMALLEST_8BIT:
        return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
    states = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("state1", "state2")}
    blocks = -(-parameter.numel() // BLOCK)
    for name in ("absmax1", "absmax2"):
        states[name] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
    return states


def _with_states(states_of: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> Callable[[Built], Built]:
    """Adam's step, replaced by one that makes these states and otherwise works in place."""

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for parameter in parameters_of(self):
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter].update(states_of(parameter))
        return loss

    def edit(built: Built) -> Built:
        for optimizer in map(inner_optimizer, built.optimizers):
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.__class__ = type("StandIn", (type(optimizer),), {"step": step})
                vars(optimizer).pop("step", None)  # a learning-rate scheduler's wrapper of the old step
                optimizer._patch_step_function()
                optimizer.state.clear()
        return built

    return edit


def _only_adam(facts: Facts) -> str:
    """Why the states cannot be replaced; empty where they can."""
    others = [optimizer.name for optimizer in facts.optimizers if not optimizer.adam]
    if others:
        return f"the optimizer is {', '.join(others)}, not torch's Adam or AdamW"
    if any(optimizer.amsgrad for optimizer in facts.optimizers):
        return "amsgrad keeps a third state, which has no such form"
    return ""


def _offer_8bit(facts: Facts) -> Change | str:
    reason = _only_adam(facts)
    if reason:
        return reason
    name = facts.optimizers[0].name
    return Change(
        rung="8-bit optimizer",
        action=f"8-bit {name}",
        speed="about none (M12)",
        maths="approximate",
        maths_note="moments are rounded to 8 bits, in blocks",
        code={
            "torch": "import bitsandbytes\n"
            f"optimizer = bitsandbytes.optim.{name}8bit(model.parameters(), ...)",
            "trainer": 'TrainingArguments(optim="adamw_bnb_8bit")',
        },
        edit=_with_states(_eight_bit_states),
        simulated_by=f"states of bitsandbytes: 8 bits, a float32 a block of {BLOCK}, 32 bits below "
        f"{SMALLEST_8BIT} elements",
        displaces=frozenset({"optimizer step"}),
    )


def _offer_offload(facts: Facts) -> Change | str:
    reason = _only_adam(facts)
    if reason:
        return reason
    host = HOST_BYTES * facts.trained
    return Change(
        rung="offloaded optimizer",
        action="AdamW with its state and its step on the host",
        speed="gradients come down to the host and weights go up in every step, and its CPU does the step: "
        "several times slower where steps are short (M10)",
        maths="same",
        maths_note="of AdamW with float32 masters; Adam's coupled weight decay becomes decoupled",
        code={
            "torch": "import memtriage\n"
            f"optimizer = memtriage.OffloadedAdamW(model.parameters(), ...)  # {size(host)} of host memory",
        },
        edit=_with_states(lambda parameter: {}),
        simulated_by="an optimizer without state on the device",
        displaces=frozenset({"optimizer step", "8-bit optimizer"}),
    )


EIGHT_BIT = Rung("8-bit optimizer", "M12", _offer_8bit)
OFFLOAD = Rung("offloaded optimizer", "M10", _offer_offload)


def _with_groups(**settings: bool) -> Callable[[Built], Built]:
    def edit(built: Built) -> Built:
        for optimizer in map(inner_optimizer, built.optimizers):
            for group in (optimizer.defaults, *optimizer.param_groups):
                group.update({key: value for key, value in settings.items() if key in group})
        return built

    return edit


def _offer_step(facts: Facts) -> Change | str:
    if not any(optimizer.foreach for optimizer in facts.optimizers):
        return "no optimizer steps by foreach kernels, which make the temporary copy"
    names = "/".join(dict.fromkeys(optimizer.name for optimizer in facts.optimizers))
    if all(optimizer.fusable for optimizer in facts.optimizers):
        return _fused(names)
    return _one_by_one(names)


def _fused(names: str) -> Change:
    code: dict[str, Any] = {"torch": f"optimizer = torch.optim.{names}(..., fused=True)"}
    if names == "AdamW":
        code["trainer"] = 'TrainingArguments(optim="adamw_torch_fused")'
    return Change(
        rung="optimizer step",
        action=f"{names}(fused=True)",
        speed="none: one kernel instead of several (M17)",
        maths="rounding",
        code=code,
        edit=_with_groups(fused=True, foreach=False),
    )


def _one_by_one(names: str) -> Change:
    return Change(
        rung="optimizer step",
        action=f"{names}(foreach=False)",
        speed="a slower step: some kernels for each parameter instead of each group (M17)",
        maths="same",
        code={"torch": f"optimizer = {names}(..., foreach=False)"},
        edit=_with_groups(foreach=False),
    )


OPTIMIZER_STEP = Rung("optimizer step", "M17", _offer_step)
