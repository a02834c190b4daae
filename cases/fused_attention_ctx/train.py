"""Fused attention in eight bits under checkpointing keeps every layer's tensors (TransformerEngine #1935).

python train.py                  the twin in pure torch, on any device
python train.py --library te     TransformerEngine, on a GPU
python train.py --cure           with memtriage's reversible remedy
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=["twin", "te"], default="twin")
    types = ["transformer", "grouped", "operations"]
    parser.add_argument("--layer-type", choices=types, default=types[0], help="the twin has the first alone")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--checkpointed", type=int, help="how many layers, the first ones [default: all]")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--no-fp8", action="store_true")
    parser.add_argument("--recipe", choices=["delayed", "current", "block"], default="delayed")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--fsdp", action="store_true", help="shard layers with fully_shard (under torchrun)")
    parser.add_argument("--cure", action="store_true", help="empty each list once backward has read it")
    parser.add_argument("--profile-memory", type=Path, metavar="FILE", help="write an allocator snapshot")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.library == "te" and not options.device.startswith("cuda"):
        parser.error("--library te needs a CUDA device; leave it out for the twin in pure torch")
    if options.library == "twin" and options.layer_type != "transformer":
        parser.error(f"--layer-type {options.layer_type} is TransformerEngine's: add --library te")
    if options.profile_memory and not options.device.startswith("cuda"):
        parser.error("--profile-memory records the CUDA allocator; leave it out on the CPU")
    return options


@dataclass(frozen=True, slots=True)
class Library:
    """Where layers come from.

    Attributes:
        package: whose `restore_from_saved` the cure is for.
        layer: makes a layer.
        context: what a forward runs in.
        checkpointed: runs a layer under checkpointing.
    """

    package: str
    layer: Callable[[], nn.Module]
    context: Callable[[], Any]
    checkpointed: Callable[[nn.Module, torch.Tensor], torch.Tensor]


def library(options: argparse.Namespace, dtype: torch.dtype) -> Library:
    if options.library == "te":
        import engine

        return Library(
            "transformer_engine",
            engine.layer_maker(options, dtype),
            engine.context_maker(options),
            engine.checkpointed,
        )
    from twin import TransformerLayer

    return Library(
        "twin",
        lambda: TransformerLayer(options.heads, options.head_size, fp8=not options.no_fp8),
        contextlib.nullcontext,
        lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    )


class Model(nn.Module):
    """Layers, the first of them checkpointed."""

    def __init__(self, library: Library, layers: int, checkpointed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(library.layer() for _ in range(layers))
        self.run_checkpointed = library.checkpointed
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = self.run_checkpointed(layer, x) if number < self.checkpointed else layer(x)
        return x


def in_use(device: torch.device) -> int:
    """Bytes allocated: the CUDA allocator's; on the CPU, of all storages that memtriage's census finds."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    import memtriage

    return sum(storage.nbytes for storage in memtriage.census().storages)


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    if options.fsdp:
        torch.distributed.init_process_group()
    device = torch.device(options.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if options.profile_memory:
            torch.cuda.memory._record_memory_history()
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    source = library(options, dtype)
    checkpointed = options.layers if options.checkpointed is None else options.checkpointed
    model = Model(source, options.layers, checkpointed).to(device, dtype)
    if options.fsdp:
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    width = options.heads * options.head_size
    with contextlib.ExitStack() as stack:
        if options.cure:
            from memtriage.treat.te_restore import EmptyAfterRestore

            stack.enter_context(EmptyAfterRestore(source.package))
        at_rest = in_use(device)
        for step in range(options.steps):
            began = time.perf_counter()
            x = torch.randn(options.batch, options.sequence, width, device=device, dtype=dtype)
            with source.context():
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            stays = in_use(device) - at_rest - x.nbytes  # while `loss` is alive, as in every training loop
            peak = "" if device.type == "cpu" else f", peak {torch.cuda.max_memory_allocated(device):,}"
            took = time.perf_counter() - began
            print(f"step {step}: loss {loss.item():.6f}, {stays:,} bytes stay{peak}, {took:.3f} s")
    if options.profile_memory:
        torch.cuda.memory._dump_snapshot(str(options.profile_memory))
    if options.fsdp:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
