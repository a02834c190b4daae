"""Gradients that are given back between steps, in place of being filled with zeros."""

from __future__ import annotations

from typing import Any

from memtriage.predict.build import Built
from memtriage.predict.plan.changes import Change, Offer, Rung
from memtriage.predict.plan.facts import Facts, with_zero_grad


def _edit(built: Built) -> Built:
    for owner in with_zero_grad(built):
        _always_to_none(owner)
    return built


def _always_to_none(owner: Any) -> None:
    original = owner.zero_grad
    owner.zero_grad = lambda *args, **kwargs: original(set_to_none=True)


def _offer(facts: Facts) -> Offer:
    if not facts.keeps_gradients:
        return Offer(absent="gradients are set to None already (torch's default)")
    change = Change(
        rung="set_to_none",
        action="zero_grad(set_to_none=True)",
        speed="none: a fill less for each parameter",
        maths="same",
        maths_note="but parameters without a gradient are passed over, where weight decay and momentum moved "
        "them before",
        code={"torch": "optimizer.zero_grad(set_to_none=True)  # before the forward pass"},
        edit=_edit,
    )
    return Offer(((change,),))


SET_TO_NONE = Rung("set_to_none", "M14", _offer)
