"""What to say of running out of memory, for each reason why it can run out just then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from memtriage.model.explanation import Label
from memtriage.playbook.entries import LEAKS

Cause = Literal[
    "shared memory",
    "worker",
    "host",
    "setup on the host",
    "setup",
    "first forward",
    "first backward",
    "second micro-batch",
    "first optimizer step",
    "after the first step",
    "evaluation with gradients",
    "evaluation without gradients",
    "evaluation",
    "longest batch",
    "later optimizer step",
    "growth",
    "unmeasured",
]
"""Why memory ran out just then, as far as the moment tells."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to say of a cause.

    Attributes:
        entry: of the playbook.
        why: the mechanism; `{phase}` and `{asked}` ("asked for 2.0 GiB") are filled in.
        fix: what to do, the first thing first.
        fix_on_cpu: the same for tensors on the CPU, where it differs.
        suspects: where earlier attempts had fitted, what may have changed since; ends the mechanism.
    """

    entry: str
    why: str
    fix: str
    fix_on_cpu: str | None = None
    suspects: str | None = None


ADVICE: Final[Mapping[Cause, Advice]] = {
    "shared memory": Advice(
        "M3",
        "A DataLoader worker found no room in shared memory (/dev/shm) for a batch",
        "Give /dev/shm more room (containers have 64 MiB by default: `docker run --shm-size` or "
        "`--ipc=host`), or use fewer workers and a smaller prefetch_factor.",
    ),
    "worker": Advice(
        "M3",
        "A DataLoader worker {asked}, and the host had none left",
        "Use fewer DataLoader workers and a smaller prefetch_factor, and let each item load only what it "
        "needs (memory-mapped arrays instead of copies).",
    ),
    "host": Advice(
        "M3",
        "The process {asked} that is not a tensor's, and the host had none left",
        "Hold less in host memory: copies of the dataset, offloaded state, pinned buffers, the DataLoader's "
        "workers and prefetching; or raise the limit (cgroup, ulimit, scheduler).",
    ),
    "setup on the host": Advice(
        "M3",
        "Before training began a CPU tensor {asked}, more than the host would give",
        "Compare the size with the memory of the host or its cgroup; load lazily or in pieces "
        "(memory-mapped files, torch.load(mmap=True)) or in 16 bits.",
    ),
    "setup": Advice(
        "M4",
        "The setup {asked} before the first forward: weights, buffers and data alone do not fit",
        "Load the weights in 16 bits (M6) and once only (map_location), and see what else is on the "
        "device; then shard them (M9), offload them (M10), or train adapters over a 4-bit base (M13).",
    ),
    "first forward": Advice(
        "M4",
        "The first forward {asked} before any gradient or optimizer state existed: weights and activations "
        "alone do not fit",
        "It does not fit: take the ladder in order of cost, a smaller micro-batch with gradient "
        "accumulation (M5), bf16 autocast (M6), activation checkpointing (M7).",
    ),
    "first backward": Advice(
        "M14",
        "The first backward {asked}: gradients come on top of every activation that the forward saved",
        "Checkpoint the largest blocks (M7, use_reentrant=False); where the logits are the large term, use "
        "a fused or chunked cross-entropy; then a smaller micro-batch with gradient accumulation (M5) or "
        "bf16 autocast (M6).",
    ),
    "second micro-batch": Advice(
        "M14",
        "The {phase} of the second micro-batch {asked}: its activations come on top of the first one's "
        "gradients",
        "Checkpoint the largest blocks (M7, use_reentrant=False); then a smaller micro-batch with more "
        "accumulation (M5), bf16 autocast (M6) or sharded gradients (M9).",
    ),
    "first optimizer step": Advice(
        "M17",
        "The first optimizer step {asked}: optimizers create their state in it (8 bytes per parameter for "
        "fp32 AdamW), next to weights and gradients",
        "Use an 8-bit or paged optimizer (M12, 2 bytes per parameter instead of 8), or shard the state over "
        "ranks (M9); fused=True or foreach=False spares temporaries as large as the weights.",
        "Use an optimizer with less state (it changes convergence), keep weights and so the state in bf16, "
        "or shard the state over machines (M9).",
    ),
    "after the first step": Advice(
        "M17",
        "The {phase} after the first optimizer step {asked}: it is the first to have the optimizer's state "
        "(8 bytes per parameter for fp32 AdamW) next to its activations",
        "Size the run for its second step: use an 8-bit or paged optimizer (M12, 2 bytes per parameter "
        "instead of 8), shard the state over ranks (M9), or checkpoint the largest blocks (M7).",
        "Size the run for its second step: checkpoint the largest blocks (M7), use an optimizer with less "
        "state (it changes convergence), or shard the state over machines (M9).",
    ),
    "evaluation with gradients": Advice(
        "M15",
        "Evaluation {asked} with gradients enabled: activations are kept for a backward that never comes",
        "Run evaluation under torch.no_grad() or torch.inference_mode(), and keep reduced results (argmax, "
        "a running sum) instead of outputs.",
    ),
    "evaluation without gradients": Advice(
        "M15",
        "Evaluation {asked} although it keeps no activations: its batch is larger than training's, or "
        "results of earlier batches are kept",
        "Keep reduced results (argmax, a running sum, or at least .cpu()) instead of outputs; use the batch "
        "size of training for evaluation.",
        "Keep reduced results (argmax, a running sum) instead of outputs; use training's batch size for "
        "evaluation.",
    ),
    "evaluation": Advice(
        "M15",
        "Evaluation {asked}: gradients are enabled, its batch is larger than training's, or results of "
        "earlier batches are kept",
        "Run evaluation under torch.no_grad() or torch.inference_mode(); keep reduced results (argmax, a "
        "running sum) instead of outputs; use training's batch size for evaluation.",
    ),
    "longest batch": Advice(
        "M16",
        "The {phase} {asked} for the largest batch so far: activations grow with the batch",
        "Cap the length, or bucket batches by length or tokens, and size the run by running its largest "
        "batch first; then checkpoint the largest blocks (M7).",
    ),
    "later optimizer step": Advice(
        LEAKS,
        "The optimizer step {asked} although an earlier one fitted",
        "Compare allocated at the end of each step: if it rises, a leak led here; if not, look for "
        "parameters or optimizers that join later; fused=True or foreach=False spares temporaries as large "
        "as the weights.",
        "Compare memory in use at the end of each step: if it rises, a leak led here; if not, look for "
        "parameters or optimizers that join later.",
        suspects="something alive has grown since, this step creates state that earlier ones did not, or "
        "free memory is in more pieces",
    ),
    "growth": Advice(
        LEAKS,
        "The {phase} {asked} although a batch at least as large had fitted before",
        "Compare allocated with reserved at the same point of each step: where allocated rises, find what "
        "keeps it and detach() what is stored; where only reserved rises, turn on expandable segments (M8).",
        "Compare memory in use at the same point of each step: where it rises, find what keeps it and "
        "detach() what is stored.",
        suspects="something alive has grown since, or free memory is in more pieces",
    ),
    "unmeasured": Advice(
        "M19",
        "The {phase} {asked} although earlier ones had fitted",
        "Compare memory in use at the same point of each step, and the sizes of the batches: where memory "
        "rises, find what keeps it and detach() what is stored; where this batch was the largest, cap or "
        "bucket lengths (M16).",
        suspects="this batch is larger, something alive has grown since, or free memory is in more pieces",
    ),
}

FIRST: Final[Mapping[Label, str]] = {
    "absurd_request": "Find the length or the index that became this size.",
    "allocator_limit": "Raise or remove the cap (torch.cuda.set_per_process_memory_fraction) if the rest of "
    "the device is yours.",
    "driver_refused_though_free": "Look for what makes the driver refuse (a limit of a MIG slice or of "
    "single allocations, the driver's version) before you shrink the model.",
    "other_process_or_outside_allocator": "Free the device first: nvidia-smi names who else is on {device}.",
    "private_pools": "Capture fewer or smaller graphs, or let them share one pool.",
    "fragmentation": "Turn on expandable segments first (M8, "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True), unless they are on.",
}
"""What comes before the fix where the figures of the message prove something; `{device}` is filled in."""
