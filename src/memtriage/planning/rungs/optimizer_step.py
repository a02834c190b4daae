"""An optimizer step without a temporary copy of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memtriage.planning.changes import Change, Offer, Rung
from memtriage.planning.facts import Facts, inner_optimizer
from memtriage.prediction.build import Built


def _with_groups(**settings: bool) -> Callable[[Built], Built]:
    def edit(built: Built) -> Built:
        for optimizer in map(inner_optimizer, built.optimizers):
            for group in (optimizer.defaults, *optimizer.param_groups):
                group.update({key: value for key, value in settings.items() if key in group})
        return built

    return edit


def _offer(facts: Facts) -> Offer:
    if not any(optimizer.foreach for optimizer in facts.optimizers):
        return Offer(absent="no optimizer steps by foreach kernels, which make the temporary copy")
    names = "/".join(dict.fromkeys(optimizer.name for optimizer in facts.optimizers))
    if all(optimizer.fusable for optimizer in facts.optimizers):
        return Offer(((_fused(names),),))
    return Offer(((_one_by_one(names),),))


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


OPTIMIZER_STEP = Rung("optimizer step", "M17", _offer)
