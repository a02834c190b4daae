"""16-bit activations: autocast to bfloat16, or a whole model of bfloat16."""

from __future__ import annotations

from typing import Any, Final

import torch

from memtriage.planning.changes import Change, Rung
from memtriage.planning.facts import Facts
from memtriage.prediction.build import Built
from memtriage.prediction.operators import mapped

_NARROW: Final = frozenset({torch.bfloat16, torch.float16})


def _autocast(built: Built) -> Built:
    model = built.model
    model.forward = torch.autocast("cuda", dtype=torch.bfloat16)(model.forward)
    return built


def _whole(built: Built) -> Built:
    built.model.to(torch.bfloat16)
    built.model.register_forward_pre_hook(_narrowed, with_kwargs=True)
    return built


def _narrowed(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return mapped(args, _narrow), mapped(kwargs, _narrow)


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.dtype is torch.float32 else tensor


def _offer_autocast(facts: Facts) -> Change | str:
    if facts.autocast:
        return "the model runs under autocast already"
    if facts.parameter_types <= _NARROW:
        return "all parameters are of 16 bits already"
    return Change(
        rung="bf16 autocast",
        action="bf16 autocast",
        speed="none: faster on Ampere and newer (M6)",
        maths="rounding",
        maths_note="fp16 instead of bf16 needs loss scaling",
        code={
            "torch": 'model.forward = torch.autocast("cuda", dtype=torch.bfloat16)(model.forward)',
            "trainer": "TrainingArguments(bf16=True)  # its fp32 copy of the model's outputs comes on top",
            "accelerate": 'Accelerator(mixed_precision="bf16")  # its fp32 copy of the outputs comes on top',
            "lightning": 'Trainer(precision="bf16-mixed")',
        },
        edit=_autocast,
    )


def _offer_whole(facts: Facts) -> Change | str:
    if facts.parameter_types <= _NARROW:
        return "all parameters are of 16 bits already"
    return Change(
        rung="bf16 weights",
        action="weights, gradients and optimizer state in bf16",
        speed="none: faster on Ampere and newer (M6)",
        maths="approximate",
        maths_note="updates of less than about 1/256 of a weight round to nothing",
        code={
            "torch": "model = model.to(torch.bfloat16)  # before the optimizer is made; inputs likewise",
            "trainer": "model = AutoModel.from_pretrained(..., dtype=torch.bfloat16)",
            "lightning": 'Trainer(precision="bf16-true")',
        },
        edit=_whole,
        displaces=frozenset({"bf16 autocast"}),
    )


AUTOCAST = Rung("bf16 autocast", "M6", _offer_autocast)
WHOLE = Rung("bf16 weights", "M6", _offer_whole)
