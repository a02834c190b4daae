"""Rungs that change one setting: of the allocator, the attention kernel, gradients freed between steps."""

from __future__ import annotations

from typing import Any, Final

from memtriage.planning.changes import Change, Rung
from memtriage.planning.facts import Facts, huggingface_in, with_zero_grad
from memtriage.prediction.build import Built


def _use_sdpa(built: Built) -> Built:
    huggingface_in(built.model).set_attn_implementation("sdpa")
    return built


def _offer_sdpa(facts: Facts) -> Change | str:
    if facts.huggingface is None:
        return (
            "there is no Transformers model whose attention could be switched; where own code "
            "computes softmax(q k^T) v, call torch.nn.functional.scaled_dot_product_attention"
        )
    if facts.huggingface.attention != "eager":
        return f"attention is {facts.huggingface.attention} already"
    if not facts.huggingface.attends_by_sdpa:
        return "this model has no attention by scaled_dot_product_attention"
    return Change(
        rung="attention",
        action='attention by scaled_dot_product_attention instead of "eager"',
        speed="none: faster (M11)",
        maths="rounding",
        code={
            "torch": 'model.set_attn_implementation("sdpa")\n'
            '# or from_pretrained(..., attn_implementation="sdpa")'
        },
        edit=_use_sdpa,
    )


ATTENTION = Rung("attention", "M11", _offer_sdpa)


_EXPANDABLE: Final = "expandable segments"
_PRIMED: Final = "primed memory"
_SETTING: Final = "expandable_segments:True"


def allocator_rung(conf: str) -> Rung:
    """The rung for a program whose allocator is configured so."""

    def offer(facts: Facts) -> Change | str:
        if "expandable_segments" in conf:
            return f"the allocator's options set it already: {conf}"
        if "max_split_size_mb" in conf:
            return "it does not go together with max_split_size_mb: drop that option first"
        variable = f"PYTORCH_CUDA_ALLOC_CONF={','.join(filter(None, (conf, _SETTING)))}"
        return Change(
            rung=_EXPANDABLE,
            action=f"PYTORCH_CUDA_ALLOC_CONF={_SETTING}",
            speed="about none in steady training; 33 to 40 % per step were reported where "
            "weights travel between processes by CUDA IPC (M8)",
            maths="same",
            code={"torch": f"export {variable}  # in the shell, before the process starts"},
            conf=_SETTING,
        )

    return Rung(_EXPANDABLE, "M8", offer, configures=True)


def primed_rung(conf: str) -> Rung:
    """Blocks that are allocated first, for a program whose allocator is configured so."""

    def offer(facts: Facts) -> Change | str:
        if "expandable_segments:True" in conf:
            return "segments are expandable, which have no fixed sizes"
        return Change(
            rung=_PRIMED,
            action="a few blocks allocated and freed first, so that memory packs closely",
            speed="none for steps; one to two minutes to choose the blocks (M8)",
            maths="same",
            code={
                "torch": "memtriage.prime(build)  # before the model is built; "
                "or of a script: memtriage run --prime SCRIPT"
            },
            primed=True,
            displaces=frozenset({_EXPANDABLE}),
        )

    return Rung(_PRIMED, "M8", offer, configures=True)


def _free_gradients(built: Built) -> Built:
    for owner in with_zero_grad(built):
        _always_to_none(owner)
    return built


def _always_to_none(owner: Any) -> None:
    original = owner.zero_grad
    owner.zero_grad = lambda *args, **kwargs: original(set_to_none=True)


def _offer_freed_gradients(facts: Facts) -> Change | str:
    if not facts.keeps_gradients:
        return "gradients are set to None already (torch's default)"
    return Change(
        rung="set_to_none",
        action="zero_grad(set_to_none=True)",
        speed="none: a fill less for each parameter",
        maths="same",
        maths_note="but parameters without a gradient are passed over, where weight decay and momentum moved "
        "them before",
        code={"torch": "optimizer.zero_grad(set_to_none=True)  # before the forward pass"},
        edit=_free_gradients,
    )


SET_TO_NONE = Rung("set_to_none", "M14", _offer_freed_gradients)
