"""What to say of a finding in a memory snapshot, for each cause that a recording can show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from memtriage.playbook.entries import LEAKS

SnapshotCause = Literal[
    "growth in forward",
    "growth in backward",
    "growth elsewhere",
    "fragmentation",
    "needed fragmentation",
    "workspace fragmentation",
    "surplus in segments",
    "surplus of the past",
    "unused stream",
    "side stream",
    "private pool",
    "several private pools",
    "residue",
    "allocator limit",
    "free in holes",
    "device full",
]
"""What a recording shows to be wrong with a device."""

FreeMemory = Literal["in holes", "elsewhere", "too little"]
"""Where the allocator had free memory when a request failed."""


@dataclass(frozen=True, slots=True)
class SnapshotAdvice:
    """What to say of a cause.

    Attributes:
        entry: of the playbook.
        why: the mechanism. For a failed request, `{free}` is filled in from `FREE_MEMORY`.
        fix: what to do.
        otherwise: what to do where a replay shows that expandable segments would not help.
    """

    entry: str
    why: str
    fix: str
    otherwise: str = ""


FREE_MEMORY: Final[Mapping[FreeMemory, str]] = {
    "in holes": "enough was free, but no hole was large enough, and",
    "elsewhere": "enough was free, but for other streams or in private pools, and",
    "too little": "live memory and the request together do not fit:",
}
"""How the mechanism of a failed request begins."""

CLEAR_KNOWN: Final = "memtriage.clear_caches({names}) where a phase ends; "
"""Comes before the fix for fragmentation where known holders that may be cleared pin segments."""

ADVICE: Final[Mapping[SnapshotCause, SnapshotAdvice]] = {
    "growth in forward": SnapshotAdvice(
        LEAKS,
        "what the forward pass allocates stays alive after the step, and adds up: the autograd graph "
        "of each step (or its outputs) is kept by something that outlives the step",
        "store `.detach()` or `.item()` of what is logged or added up, never a tensor with a grad_fn",
    ),
    "growth in backward": SnapshotAdvice(
        LEAKS,
        "what the backward pass allocates stays alive after the step, and adds up: a gradient, or "
        "what a custom backward put on its context, is kept by something that outlives the step",
        "clear attributes of `ctx` once they are used, and do not keep outputs whose graph has them",
    ),
    "growth elsewhere": SnapshotAdvice(
        LEAKS,
        "each step keeps one more piece of what this line allocates",
        "clear, bound or reduce what keeps these tensors, or move them to the host",
    ),
    "fragmentation": SnapshotAdvice(
        "M8",
        "blocks that live long are in large segments next to memory that came and went: one live "
        "block keeps its whole segment from being released",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True releases by the page; or "
        "allocate what is kept before the first step, or all at once",
        "allocate what is kept before the first step, or all at once",
    ),
    "needed fragmentation": SnapshotAdvice(
        "M8",
        "blocks that every run needs are in large segments next to memory that came and went: one live "
        "block keeps its whole segment from being released",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True releases by the page; or allocate parameters and "
        "optimizer state before the first large activations",
        "allocate parameters and optimizer state before the first large activations",
    ),
    "workspace fragmentation": SnapshotAdvice(
        "M8",
        "a cuBLAS workspace, which lives as long as the process, was cut from a large segment that had come "
        "free, and keeps all of it from being released",
        "run a small matrix product, forward and backward, before the first large allocation: the workspace "
        "then has a segment of its own; or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which releases "
        "by the page",
        "run a small matrix product, forward and backward, before the first large allocation: the workspace "
        "then has a segment of its own",
    ),
    "surplus in segments": SnapshotAdvice(
        "M8",
        "sizes change from step to step: what is asked for does not fit the free segments of earlier steps, "
        "so that new ones are reserved in addition",
        "PYTORCH_CUDA_ALLOC_CONF={setting} (it reserved least when replayed, see the evidence); "
        "padding lengths to a few sizes also helps",
    ),
    "surplus of the past": SnapshotAdvice(
        "M8",
        "the cache keeps what was reserved earlier; the settings tried did not save it in the replay of the "
        "last steps",
        "call `torch.cuda.empty_cache()` once after the phase that needed the memory, if other processes or "
        "libraries need it",
    ),
    "unused stream": SnapshotAdvice(
        "M8",
        "the allocator caches memory per stream; this stream is no longer used, and no other stream "
        "can use its memory",
        "allocate on the stream that uses the memory (`record_stream` where another reads it), or call "
        "`torch.cuda.empty_cache()` once after the stream's last use",
    ),
    "side stream": SnapshotAdvice(
        "M8",
        "the allocator caches memory for each stream apart: what this stream has free, no other stream can "
        "use",
        "allocate on the stream that does most of the work and pass the tensors on (`wait_stream`, then "
        "`record_stream` where the side stream reads them), so that both use one cache; or call "
        "`torch.cuda.empty_cache()` when the stream is not needed for a while",
    ),
    "private pool": SnapshotAdvice(
        "M18",
        "memory of a private pool (a CUDA graph's, or a `MemPool`) cannot be used by anything else, "
        "even when free",
        "capture fewer or smaller graphs, share one pool between them (`pool=`), and drop graphs and "
        "pools that are no longer used",
    ),
    "several private pools": SnapshotAdvice(
        "M18",
        "each CUDA graph that is captured without `pool=` gets a private pool of its own (as does each "
        "`MemPool`), and no pool can use what another has free",
        "capture all graphs into one pool: `pool = torch.cuda.graph_pool_handle()`, then "
        "`torch.cuda.graph(graph, pool=pool)` for each. Graphs that share a pool must be replayed in the "
        "order of their capture, never at the same time",
    ),
    "residue": SnapshotAdvice(
        "M19",
        "the parameters left the device, but what was made from them or next to them is still held: "
        "cached copies on modules, workspaces, scaling factors, the last outputs",
        "clear these caches at the phase boundary (attributes of modules, lists in a trainer; those of "
        "libraries with `memtriage.clear_caches()`), then call `torch.cuda.empty_cache()`",
    ),
    "allocator limit": SnapshotAdvice(
        "M2",
        "{free} the allocator may not reserve more (a memory fraction is set, or the driver refused all the "
        "same)",
        "raise or remove the limit (`set_per_process_memory_fraction`, `per_process_memory_fraction`), then "
        "see what is alive at the peak",
    ),
    "free in holes": SnapshotAdvice(
        "M8",
        "{free} the device has no room for another segment",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins such holes; steadier shapes make fewer",
    ),
    "device full": SnapshotAdvice(
        "M4",
        "{free} the device has no room for another segment",
        "take the ladder for what is alive then: activations by checkpointing or a smaller micro-batch, "
        "optimizer state by sharding or 8 bit",
    ),
}
