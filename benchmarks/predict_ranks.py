"""A job larger than any test machine: Llama-70B under FSDP2, predicted for one rank.

    python benchmarks/predict_ranks.py [--ranks 64] [--layers 80] [--tokens 8192]

Prints the peaks of two steps, seconds and the process's highest resident memory. Needs transformers, and no
GPU.
"""

from __future__ import annotations

import argparse
import resource
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import memtriage

GIB = 1 << 30
WORDS = 128256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()

    def build(device: Any) -> Any:
        return llama(device, options.layers, options.tokens)

    prediction = memtriage.predict(build, world_size=options.ranks)
    for number, step in enumerate(prediction.steps, 1):
        print(
            f"step {number}: {step.peak_allocated / GIB:.1f} GiB allocated, "
            f"{step.peak_reserved / GIB:.1f} GiB reserved"
        )
    for owner, size in prediction.by_owner.items():
        print(f"  {owner:<22}{size / GIB:8.2f} GiB")
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{prediction.seconds:.0f} s, {resident >> 10} MiB of host memory")


def llama(device: Any, layers: int, tokens: int) -> Any:
    """Model, optimizer and step of a Llama with the shape of the 70B's layers."""
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=WORDS,
        max_position_embeddings=tokens,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        ids = torch.randint(0, WORDS, (1, tokens), device=device)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


if __name__ == "__main__":
    main()
