"""Rungs that compile the model: fusion keeps fewer activations, a budget makes backward recompute more.

Each candidate runs Inductor, which takes a minute: both are tried only when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch._functorch import config

from memtriage.planning.changes import Change, Offer, Rung
from memtriage.planning.facts import Facts
from memtriage.prediction.build import Built
from memtriage.prediction.compiled import inductor

BUDGETS: Final = (0.8, 0.6, 0.4, 0.2)
"""Shares of the activations that are kept, from the mildest; PyTorch's default is 1."""
_WHOLE: Final = "torch.compile"
_SLOW: Final = "each candidate is compiled, which takes a minute"
_CODE: Final = "model.forward = torch.compile(model.forward)"
"""`model.compile()` skips models whose class is one of `torch.nn`, such as `nn.Sequential`."""


def _compile(built: Built) -> Built:
    built.model.forward = torch.compile(built.model.forward)
    return built


def _within(share: float, compiled: bool) -> Callable[[Built], Built]:
    """Compile with a budget, which PyTorch reads when a function is first called."""

    def edit(built: Built) -> Built:
        if not compiled:
            _compile(built)

        def step() -> Any:
            with config.patch(activation_memory_budget=share):
                return built.step()

        return Built(built.model, built.optimizers, step)

    return edit


def _impossible(facts: Facts) -> str:
    missing = inductor.missing()
    if missing is not None:
        return f"it cannot be predicted here: {missing}"
    return f"the program is one of several ranks ({facts.parallel})" if facts.parallel else ""


def _offer_compile(facts: Facts) -> Offer:
    absent = "the program is compiled already" if facts.compiled else _impossible(facts)
    if absent:
        return Offer(absent=absent)
    change = Change(
        rung=_WHOLE,
        action="compile the model's forward",
        speed="faster steps; the first one compiles, which takes a minute or more",
        maths="rounding",
        code={"torch": _CODE, "trainer": "TrainingArguments(torch_compile=True)"},
        edit=_compile,
    )
    return Offer(((change,),))


def _offer_budget(facts: Facts) -> Offer:
    absent = _impossible(facts)
    if absent:
        return Offer(absent=absent)
    return Offer((tuple(_budget(share, facts.compiled) for share in BUDGETS),))


def _budget(share: float, compiled: bool) -> Change:
    code = f"import torch._functorch.config\ntorch._functorch.config.activation_memory_budget = {share}"
    return Change(
        rung="activation budget",
        action=f"{'' if compiled else 'compiled, with '}activation_memory_budget={share}",
        speed="backward computes again what the compiler finds cheapest for its bytes",
        maths="rounding",
        code={"torch": code if compiled else f"{code}\n{_CODE}"},
        edit=_within(share, compiled),
        counts_work=True,
        displaces=frozenset({_WHOLE}),
    )


COMPILE: Final = Rung(_WHOLE, "M7", _offer_compile, on_request=_SLOW)
ACTIVATION_BUDGET: Final = Rung("activation budget", "M7", _offer_budget, on_request=_SLOW)
