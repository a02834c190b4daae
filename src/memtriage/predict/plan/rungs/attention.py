"""Attention that does not keep the scores of every pair of positions."""

from __future__ import annotations

from memtriage.predict.build import Built
from memtriage.predict.plan.changes import Change, Offer, Rung
from memtriage.predict.plan.facts import Facts, huggingface_in


def _edit(built: Built) -> Built:
    huggingface_in(built.model).set_attn_implementation("sdpa")
    return built


def _offer(facts: Facts) -> Offer:
    if facts.huggingface is None:
        return Offer(
            absent="there is no Transformers model whose attention could be switched; where own code "
            "computes softmax(q k^T) v, call torch.nn.functional.scaled_dot_product_attention"
        )
    if facts.huggingface.attention != "eager":
        return Offer(absent=f"attention is {facts.huggingface.attention} already")
    if not facts.huggingface.attends_by_sdpa:
        return Offer(absent="this model has no attention by scaled_dot_product_attention")
    change = Change(
        rung="attention",
        action='attention by scaled_dot_product_attention in place of "eager"',
        speed="none: faster (M11)",
        maths="rounding",
        code={
            "torch": 'model.set_attn_implementation("sdpa")\n'
            '# or from_pretrained(..., attn_implementation="sdpa")'
        },
        edit=_edit,
    )
    return Offer(((change,),))


ATTENTION = Rung("attention", "M11", _offer)
