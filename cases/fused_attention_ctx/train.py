"""Fused attention in eight bits keeps every layer's tensors after backward (TransformerEngine #1935).

python train.py                                         the twin in pure torch, on any device
python train.py --library te --layer-type groupedlinear TransformerEngine, on a GPU
python train.py --cure                                  with memtriage's reversible remedy
torchrun --nproc-per-node 2 train.py --fsdp 1           sharded, as the issue's script was

The options are those of the issue's script, which is TransformerEngine's FSDP example; the last group is new.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read when cuBLAS is first used: without it, its sums are not the same in every run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))

RANK = int(os.environ.get("LOCAL_RANK", 0))
DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "fp16": torch.float16, "float16": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
}  # fmt: skip
KINDS = (
    "linear", "layernorm", "rmsnorm", "layernormlinear", "layernormmlp", "multiheadattention",
    "transformerlayer", "groupedlinear", "operations",
)  # fmt: skip
TWINS = ("multiheadattention", "transformerlayer")
"""Types with attention, which the twin has too."""
ON_GPU = {"batch_size": 32, "seq_length": 1048, "num_heads": 16, "head_dim": 128, "num_layers": 3}
"""The issue's sizes."""
ON_CPU = {"batch_size": 2, "seq_length": 256, "num_heads": 4, "head_dim": 64, "num_layers": 8}
WITHOUT, REMEDY, PATCH = "none", "remedy", "patch"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    script = parser.add_argument_group("the issue's options")
    for short, name, what in (
        ("-b", "batch_size", "sequences of a batch"), ("-s", "seq_length", "tokens of a sequence"),
        ("-n", "num_heads", "attention heads"), ("-d", "head_dim", "size of a head"),
        ("-k", "num_layers", "layers, one after the other"),
    ):  # fmt: skip
        known = f"{what} [default: {ON_GPU[name]}; on a CPU {ON_CPU[name]}]"
        script.add_argument(short, f"--{name.replace('_', '-')}", type=int, help=known)
    script.add_argument("-i", "--num-iters", type=int, default=5, help="training steps [default: 5]")
    script.add_argument("--layer-type", type=str.lower, choices=KINDS, default="transformerlayer")
    script.add_argument(
        "--checkpoint-layer", type=str.lower, choices=KINDS, help="recompute layers of this type in backward"
    )
    script.add_argument("--dtype", type=str.lower, choices=DTYPES, help="[default: bf16; on a CPU fp32]")
    script.add_argument("--no-fp8", action="store_true", help="no autocast to eight bits")
    script.add_argument("--seed", type=int, default=1234)
    script.add_argument("--profile-memory", action="store_true", help="write an allocator snapshot a rank")
    script.add_argument(
        "--profile-name", default="fused_attention_ctx", help="the snapshot: gpuRANK_NAME.pickle"
    )
    script.add_argument("--no-defer-init", action="store_true", help="FSDP 1: make parameters, then shard")
    script.add_argument("--no-te-fsdp", action="store_true", help="FSDP 1: saved activations are not sharded")
    script.add_argument("-v", "--verbose", action="store_true", help="every rank prints")
    ours = parser.add_argument_group("in addition to them")
    ours.add_argument("--library", choices=["twin", "te"], default="twin")
    ours.add_argument("--recipe", choices=["delayed", "current", "block"], default="delayed")
    ours.add_argument("--fsdp", type=int, choices=[1, 2], help="shard by this FSDP (under torchrun)")
    ours.add_argument(
        "--cure", nargs="?", choices=[WITHOUT, REMEDY, PATCH], default=WITHOUT, const=REMEDY,
        help="memtriage's remedy (without a value), or the fix of TransformerEngine 2.15 as a patch",
    )  # fmt: skip
    ours.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ours.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    on_gpu = options.device.startswith("cuda")
    for name, value in (ON_GPU if on_gpu else ON_CPU).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.dtype = options.dtype or ("bf16" if on_gpu else "fp32")
    if options.library == "te" and not on_gpu:
        parser.error("--library te needs a CUDA device; leave it out for the twin in pure torch")
    if options.library == "twin" and options.layer_type not in TWINS:
        parser.error(
            f"--layer-type {options.layer_type} is TransformerEngine's: add --library te; the twin has "
            + " and ".join(TWINS)
        )
    if options.library == "twin" and options.checkpoint_layer not in (None, *TWINS):
        parser.error(
            f"--checkpoint-layer {options.checkpoint_layer} is TransformerEngine's: add --library te"
        )
    if options.profile_memory and not on_gpu:
        parser.error("--profile-memory records the CUDA allocator; leave it out on the CPU")
    if options.fsdp and "RANK" not in os.environ:
        parser.error(
            f"--fsdp {options.fsdp} runs under torchrun: torchrun --nproc-per-node 2 train.py --fsdp …"
        )
    return options


@dataclass(frozen=True, slots=True)
class Library:
    """Where layers come from.

    Attributes:
        package: whose `restore_from_saved` the cure is for.
        kinds: classes of layers, by the names of `--layer-type`.
        layer: makes the layer of a number, from 1, on a device.
        context: what a forward runs in.
        checkpoint: runs a function under checkpointing.
        prepare: called with a model that FSDP 1 has wrapped.
    """

    package: str
    kinds: dict[str, type[nn.Module]]
    layer: Callable[[int, str], nn.Module]
    context: Callable[[], Any]
    checkpoint: Callable[..., Any]
    prepare: Callable[[nn.Module], None] | None


def library(options: argparse.Namespace, dtype: torch.dtype, group: Any) -> Library:
    if options.library == "te":
        import engine

        return Library(
            "transformer_engine",
            engine.KINDS,
            lambda number, device: engine.make_layer(options, dtype, number, device),
            engine.forward_context(options, group),
            engine.te.distributed.checkpoint,
            engine.te.distributed.prepare_te_modules_for_fsdp,
        )
    import twin

    kinds = {"multiheadattention": twin.MultiheadAttention, "transformerlayer": twin.TransformerLayer}

    def layer(number: int, device: str) -> nn.Module:
        with torch.device(device):
            return kinds[options.layer_type](options.num_heads, options.head_dim, fp8=not options.no_fp8)

    return Library("twin", kinds, layer, contextlib.nullcontext, checkpoint, None)


def build(
    options: argparse.Namespace, source: Library, dtype: torch.dtype, device: torch.device, group: Any
) -> nn.Module:
    """The layers, checkpointed and sharded as the options say."""
    import sharded

    deferred = options.fsdp == 1 and not options.no_defer_init
    where = "meta" if deferred else str(device)
    model: nn.Module = nn.Sequential(
        *(source.layer(number, where) for number in range(1, options.num_layers + 1))
    )
    model = model.to(dtype)
    again = None if options.checkpoint_layer is None else source.kinds[options.checkpoint_layer]
    if again is not None and options.fsdp != 1:
        sharded.checkpointed(model, again, source.checkpoint)
    if options.fsdp == 2:
        return sharded.sharded_2(model)
    if options.fsdp == 1:
        model = sharded.sharded_1(model, source.kinds[options.layer_type], dtype, device, group)
        if again is not None:
            sharded.checkpointed(model, again, source.checkpoint)
        elif source.prepare is not None and not options.no_te_fsdp:
            source.prepare(model)
    return model


def in_use(device: torch.device) -> int:
    """Bytes allocated: the CUDA allocator's; on the CPU, of all storages that memtriage's census finds."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    import memtriage

    return sum(storage.nbytes for storage in memtriage.census().storages)


def cure(options: argparse.Namespace, package: str) -> Any:
    if options.cure == REMEDY:
        from memtriage.treat.te_restore import EmptyAfterRestore

        return EmptyAfterRestore(package)
    if options.cure == PATCH:
        from upstream_fix import DropAfterRestore

        return DropAfterRestore(package)
    return contextlib.nullcontext()


def fix_order_of_sums(options: argparse.Namespace) -> None:
    """The same bits in every run; but TransformerEngine's FP8 attention has no such backward."""
    if options.library == "te" and options.layer_type in TWINS:
        return
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def say(options: argparse.Namespace, text: str) -> None:
    if RANK == 0 or options.verbose:
        print(f"[GPU-{RANK}] {text}" if options.verbose else text, flush=True)


def train(
    options: argparse.Namespace, model: nn.Module, source: Library, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """The steps; what they leave allocated while the last loss is alive, and what goes with that loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    shape = (options.seq_length, options.batch_size, options.num_heads * options.head_dim)
    losses = []
    for step in range(options.num_iters):
        began = time.perf_counter()
        x = torch.rand(*shape, device=device, dtype=dtype)
        with source.context():
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del x
        losses.append(f"{loss.item():.6f}")
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        more = (
            ""
            if peak is None
            else f", {torch.cuda.memory_allocated(device):,} bytes allocated, peak {peak:,}"
        )
        say(options, f"step {step}: loss {losses[-1]}{more}, {time.perf_counter() - began:.3f} s")
    # The loss is alive until the next one is bound, as in every training loop.
    allocated = in_use(device)
    del loss
    return {
        "losses": losses, "allocated": allocated, "stays": allocated - in_use(device), "peak": peak
    }  # fmt: skip


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    fix_order_of_sums(options)
    device = torch.device(options.device)
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", RANK)
        torch.cuda.set_device(device)
    group = None
    if options.fsdp:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
        )
        group = dist.group.WORLD
    dtype = DTYPES[options.dtype]
    source = library(options, dtype, group)
    model = build(options, source, dtype, device, group)
    if options.profile_memory:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    with cure(options, source.package):
        result = train(options, model, source, dtype, device)
    say(
        options,
        f"{result['allocated']:,} bytes allocated after the last step; {result['stays']:,} go with its loss",
    )
    if options.profile_memory:
        torch.cuda.memory._dump_snapshot(f"gpu{RANK}_{options.profile_name}.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)
    if options.fsdp:
        ranks: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, result)
        dist.barrier()
        result["ranks"] = [{name: rank[name] for name in ("allocated", "stays", "peak")} for rank in ranks]
        dist.destroy_process_group()
    if options.out is not None and RANK == 0:
        options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
