"""Cross-entropy in chunks of rows: the logits of the whole batch never exist at once."""

from __future__ import annotations

import textwrap
from typing import Any, Final

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memtriage.planning.changes import Change, Rung
from memtriage.planning.facts import Facts, huggingface_in
from memtriage.prediction.build import Built

CHUNKS: Final = 8
IGNORED: Final = -100
"""Label of positions that do not count, in torch and in Transformers."""

_CODE: Final = f"""
    import torch.nn.functional as F
    from torch.utils.checkpoint import checkpoint
    head = model.get_output_embeddings()

    def part(rows, wanted):
        return F.cross_entropy(F.linear(rows, head.weight, head.bias).float(), wanted, reduction="sum")

    def chunked_loss(logits, labels, num_items_in_batch=None, **_):  # these are hidden states
        wanted = F.pad(labels, (0, 1), value={IGNORED})[..., 1:].flatten()
        chunks = zip(logits.flatten(0, -2).chunk({CHUNKS}), wanted.chunk({CHUNKS}))
        total = sum(checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks)
        return total / ((wanted != {IGNORED}).sum() if num_items_in_batch is None else num_items_in_batch)

    head.forward = lambda hidden: hidden  # while training: `.logits` are hidden states then
    model.loss_function = chunked_loss
"""


def _edit(built: Built) -> Built:
    model = huggingface_in(built.model)
    head = model.get_output_embeddings()

    def part(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(rows, head.weight, head.bias).float()
        return functional.cross_entropy(logits, wanted, reduction="sum")

    def chunked_loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        wanted = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].flatten()
        chunks = zip(logits.flatten(0, -2).chunk(CHUNKS), wanted.chunk(CHUNKS), strict=True)
        total = sum(checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks)
        return total / (wanted != IGNORED).sum()

    head.forward = lambda hidden: hidden
    model.loss_function = chunked_loss
    return built


def _offer(facts: Facts) -> Change | str:
    if facts.huggingface is None or not facts.huggingface.own_loss:
        return (
            "the loss is not computed within a Transformers causal language model, so that its rows "
            "cannot be taken in chunks from outside; where own code does cross_entropy(head(x), y), call it "
            f"for {CHUNKS} chunks of rows of x, each within torch.utils.checkpoint.checkpoint"
        )
    return Change(
        rung="chunked loss",
        action=f"output layer and cross-entropy in {CHUNKS} chunks of rows",
        speed="the output layer runs forward twice",
        maths="rounding",
        code={
            "torch": textwrap.dedent(_CODE).strip(),
            "trainer": "TrainingArguments(use_liger_kernel=True)  # does the same in kernels of its own, "
            "which were not simulated",
        },
        edit=_edit,
        counts_work=True,
    )


CHUNKED_LOSS = Rung("chunked loss", "M14", _offer)
