"""When a rung of the ladder is not offered, and what is said then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from memtriage.planning.facts import Facts, HuggingFace, Knob, OptimizerFacts, RepeatedBlocks
from memtriage.planning.ladder import ladder
from memtriage.playbook.entries import PLAYBOOK

EAGER = HuggingFace("eager", True, True, "gradient_checkpointing", False)
ADAMW = OptimizerFacts("AdamW", adam=True, fusable=True, foreach=True, amsgrad=False)
SGD = replace(ADAMW, name="SGD", adam=False)
ALONE = replace(ADAMW, foreach=False)
NARROW = {"parameter_types": frozenset({torch.bfloat16, torch.float16})}
SET = "the allocator's options set it already: expandable_segments"
NO_COPY = "no optimizer steps by foreach kernels, which make the temporary copy"
NEVER = "the blocks of layers are never called"


def blocks(*containers: str, called: tuple[str, ...] | None = None, **facts: Any) -> dict[str, Any]:
    """Two repeated blocks in each container, all of which are called unless some are named."""
    levels = [RepeatedBlocks((each,), (f"{each}.0", f"{each}.1"), False) for each in containers]
    every = [name for level in levels for name in level.blocks]
    return {"levels": tuple(levels), "called": frozenset(every if called is None else called), **facts}


@pytest.mark.parametrize(
    ("name", "conf", "gpus", "facts", "said"),
    [
        ("expandable segments", "expandable_segments:True", 1, {}, f"{SET}:True"),
        ("expandable segments", "expandable_segments:False", 1, {}, f"{SET}:False"),
        ("expandable segments", "max_split_size_mb:256", 1, {}, "not go together with max_split_size_mb"),
        ("primed memory", "expandable_segments:True", 1, {}, "which have no fixed sizes"),
        ("set_to_none", "", 1, {}, "gradients are set to None already"),
        ("attention", "", 1, {}, "there is no Transformers model whose attention could be switched"),
        ("attention", "", 1, {"huggingface": replace(EAGER, attention="flash_attention_2")},
         "attention is flash_attention_2 already"),
        ("attention", "", 1, {"huggingface": replace(EAGER, attends_by_sdpa=False)},
         "this model has no attention"),
        ("optimizer step", "", 1, {}, NO_COPY),
        ("optimizer step", "", 1, {"optimizers": (ALONE, replace(ALONE, name="SGD"))},
         NO_COPY),
        ("micro-batch", "", 1, {}, "def build(device, micro_batch=16)"),
        ("micro-batch", "", 1, {"batch": Knob("micro_batch", 1, "build")}, "micro_batch is 1 already"),
        ("bf16 autocast", "", 1, NARROW, "all parameters are of 16 bits already"),
        ("bf16 weights", "", 1, NARROW, "all parameters are of 16 bits already"),
        ("chunked loss", "", 1, {}, "for 8 chunks of rows of x, each within torch.utils.checkpoint"),
        ("checkpointing", "", 1, blocks("layers", compiled=True), "the program is compiled"),
        ("checkpointing", "", 1, {}, "has no nn.ModuleList or nn.Sequential of repeated blocks"),
        ("checkpointing", "", 1, blocks("layers", "head", called=()), NEVER),
        ("checkpointing", "", 1, blocks("layers", called=("layers.0",)), NEVER),
        ("checkpointing", "", 1, blocks("layers", "head", recomputed=frozenset({"head.1"})),
         "blocks are checkpointed already"),
        *(
            (name, "", 1, {"optimizers": optimizers}, said)
            for name in ("8-bit optimizer", "offloaded optimizer")
            for optimizers, said in (
                ((ADAMW, SGD, replace(SGD, name="Lion")), "the optimizer is SGD, Lion, not torch's Adam"),
                ((ADAMW, replace(ADAMW, amsgrad=True)), "amsgrad keeps a third state"),
            )
        ),
        ("sharding", "", 1, {}, "the job has one GPU: give world_size"),
        ("sharding", "", 2, {"parallel": "DistributedDataParallel"},
         "the model is wrapped by DistributedDataParallel"),
        ("LoRA", "", 1, {"frozen": True}, "a part of the parameters is frozen already"),
    ],
)  # fmt: skip
def test_a_rung_that_is_not_offered_says_why(
    name: str, conf: str, gpus: int, facts: dict[str, Any], said: str
) -> None:
    (rung,) = [rung for rung in ladder(conf, gpus) if rung.name == name]
    offer = rung.offer(Facts(**facts))
    assert isinstance(offer, str) and said in offer
    assert rung.playbook in PLAYBOOK


def test_rungs_of_the_allocator_and_of_several_gpus_are_offered() -> None:
    several = {rung.name: rung for rung in ladder("", 4)}
    for name in ("expandable segments", "primed memory", "sharding"):
        assert isinstance(several[name].offer(Facts()), tuple)
