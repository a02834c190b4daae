"""Trains a model with and without `memtriage.compact()` every step, and says whether the losses are the same.

    compacted.py checkpointed | compiled | graphs          one process
    compacted.py fsdp                                      under torchrun

Prints one JSON object on rank 0: the losses of both runs, and of every compaction the bytes moved, the share
that is allocated of what is reserved, reasons of refusals. Without a GPU it runs on the CPU, where nothing is
moved, to try it out.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist

import memtriage

WORDS = 2048
LENGTHS = (192, 256, 128, 224)
MIB = 1 << 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Fragmented:
    """Fills memory with blocks of many sizes, every other of which is freed: what comes next is in holes.

    When it is gone, too, what came in between is alone in its segments.
    """

    def __init__(self) -> None:
        sizes = [4_000 * (1 + 7 * index % 29) for index in range(400)]
        sizes += [MIB + 300_000 * (index % 23) for index in range(200)]
        blocks = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in sizes]
        self.blocks = blocks[::2]


def make_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=512, intermediate_size=1408, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(DEVICE)


def train(kind: str, compacting: bool) -> tuple[list[float], list[memtriage.Compaction]]:
    """Losses, and what was compacted: after each forward, with its graph alive, and after each step."""
    done: list[Any] = []

    def settle(junk: list[Fragmented]) -> None:
        junk.clear()
        if compacting:
            done.append(memtriage.compact())

    junk = [Fragmented()]
    model = make_model()
    if kind == "checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif kind == "compiled":
        model = torch.compile(model)
    elif kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    # One length alone where every other would be compiled for.
    for length in LENGTHS if kind != "compiled" else LENGTHS[:1] * len(LENGTHS):
        words = torch.randint(WORDS, (4, length), generator=generator).to(DEVICE)
        junk.append(Fragmented())
        loss = model(input_ids=words, labels=words).loss
        settle(junk)
        loss.backward()
        junk.append(Fragmented())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
        settle(junk)
    return losses, done


def compare(kind: str) -> dict[str, Any]:
    plain, _ = train(kind, compacting=False)
    compacted, done = train(kind, compacting=True)
    shares = [
        result.after.allocated / result.after.reserved
        for result in done
        if result.after and result.after.reserved
    ]
    return {
        "plain": plain,
        "compacted": compacted,
        "moved": [result.moved for result in done],
        "shares": shares,
        "slack": [
            result.after.reserved - result.after.allocated for result in done if result.after is not None
        ],
        "refused": sorted({row.reason for result in done for row in result.refused}),
        "stopped": [
            device.stopped for result in done for device in result.devices if device.stopped is not None
        ],
    }


def with_graphs() -> dict[str, Any]:
    """A function compiled to CUDA graphs: nothing may move, and its results stay right.

    The graphs and their trees are those of `mode="reduce-overhead"`; this backend leaves out Inductor.
    """
    junk = [Fragmented()]
    weight = torch.randn(512, 512, device=DEVICE)
    backend = "cudagraphs" if DEVICE == "cuda" else "eager"
    function = torch.compile(lambda x: torch.relu(x @ weight).sum(dim=1), backend=backend)
    inputs = torch.randn(64, 512, device=DEVICE)
    expected = torch.relu(inputs @ weight).sum(dim=1)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        result = function(inputs).clone()
    survivors = junk[0].blocks[::9]
    junk.clear()
    done = memtriage.compact()
    del survivors
    torch.compiler.cudagraph_mark_step_begin()
    again = function(inputs).clone()
    return {
        "moved": [done.moved],
        "refused": [row.reason for row in done.refused],
        "same": bool(torch.equal(result, again)),
        "right": bool(torch.allclose(again, expected, rtol=1e-3, atol=1e-3)),
    }


def main() -> None:
    kind = sys.argv[1]
    torch.use_deterministic_algorithms(True, warn_only=True)
    ranked = "LOCAL_RANK" in os.environ
    if ranked:
        if DEVICE == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    found = with_graphs() if kind == "graphs" else compare(kind)
    if not ranked or dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    if ranked:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
