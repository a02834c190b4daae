"""What can help a case: which actions of the playbook, in which order, why, and the bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memtriage.messages.case import Case
from memtriage.messages.fixes import fixes
from memtriage.messages.shapes import Product
from memtriage.model.explanation import Fix
from memtriage.playbook.entries import ACTIONS
from support.message_cases import GIB, MIB, device_case, sizes_case, text_case

Told = tuple[str, str, int | None] | tuple[str, str, int | None, str]
"""An action's key in the playbook, why it helps, the bytes, and what the action names."""

OTHERS = [{"pid": 7, "in_use": 3 * GIB}]
LOGITS = Product("the logits", ("batch", "seq", "vocab"), 4)
SCORES = Product("the scores", ("batch", "seq", "seq"), 2)
OTHER = Product("a tensor", ("heads", "hidden"), 2)
FULL = device_case("does_not_fit", free=GIB, allocated=77 * GIB, reserved_unallocated=GIB)
HOLES = device_case("fragmentation", free=GIB, allocated=60 * GIB, reserved_unallocated=18 * GIB)
OUTSIDE = device_case(
    "other_process_or_outside_allocator", free=GIB, allocated=30 * GIB, reserved_unallocated=GIB
)

_STAY = "weights, gradients and optimizer state do not shrink with the batch"
WEIGHTS: list[Told] = [
    ("optimizer-8bit", f"{_STAY}: 2 B of state per parameter instead of 8", None),
    ("shard", f"{_STAY}; each of several GPUs holds a share", None),
    ("offload", f"{_STAY}; the host can hold them, but is slower", None),
    ("adapters", "finetuning only: gradients and states exist for adapters only", None),
]
"""What makes weights smaller, where the number of parameters is not known."""
ACTIVATIONS: list[Told] = [
    ("fused-loss", "with a large vocabulary the loss is often the peak: 12 to 14 B per logit", None),
    ("bf16", "halves activations that are fp32", None),
    ("checkpointing", "keeps only the inputs of blocks and recomputes the rest", None),
    ("attention", "keeps no attention scores in memory, if attention still materializes them", None),
    ("shorter", "activations grow with the length; this changes the task", None),
]


def weights_alone(free: str) -> list[Told]:
    why = f"weights alone do not fit{free}"
    return [
        ("shard", f"{why}; each of several GPUs holds a share", None),
        ("offload", f"{why}; the host can hold them, but is slower", None),
        ("adapters", "finetuning only: gradients and states exist for adapters only", None),
    ]


def fix(told: Told) -> Fix:
    key, why, saves, *named = told
    entry, action = ACTIONS[key]
    return Fix(
        playbook=entry.name,
        action=": ".join([action.action, *named]),
        why=why,
        math=action.maths,
        costs=action.costs,
        saves_bytes=saves,
    )


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (
            FULL,
            [
                ("micro-batch", "activations grow with the micro-batch; free 5.00 GiB", None),
                *ACTIVATIONS,
                (
                    "optimizer-8bit",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch: 2 B of state "
                        "per parameter instead of 8"
                    ),
                    None,
                ),
                (
                    "shard",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch; each of "
                        "several GPUs holds a share"
                    ),
                    None,
                ),
                (
                    "offload",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch; the host can "
                        "hold them, but is slower"
                    ),
                    None,
                ),
                ("adapters", "finetuning only: gradients and states exist for adapters only", None),
            ],
        ),
        (
            replace(FULL, serving=True),
            [
                (
                    "leave-headroom",
                    "the share is of weights and cache; activations and graphs need more",
                    None,
                ),
                ("smaller-graphs", "each captured batch size keeps buffers of its own", None),
                (
                    "less-on-device",
                    "weights, cache and the requests at once are what an engine asks for",
                    None,
                ),
            ],
        ),
        (
            replace(FULL, phase="optimizer"),
            [
                ("fused-step", "the peak is the optimizer's step, not activations; free 5.00 GiB", None),
                (
                    "optimizer-8bit",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch: 2 B of state "
                        "per parameter instead of 8"
                    ),
                    None,
                ),
                (
                    "shard",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch; each of "
                        "several GPUs holds a share"
                    ),
                    None,
                ),
                (
                    "offload",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch; the host can "
                        "hold them, but is slower"
                    ),
                    None,
                ),
                ("adapters", "finetuning only: gradients and states exist for adapters only", None),
            ],
        ),
        (
            replace(FULL, phase="evaluation", shapes={"batch": 1}),
            [
                ("no-grad", "it is an evaluation: with gradients on, every activation is kept", None),
                ("keep-reduced", "outputs kept on the device from batch to batch add up", None),
                *ACTIVATIONS,
            ],
        ),
        (
            replace(FULL, phase="setup", shapes={"params": 1000, "ranks": 4}),
            [
                (
                    "shard",
                    "weights alone do not fit; free 5.00 GiB; each of several GPUs holds a share",
                    6000,
                ),
                (
                    "offload",
                    "weights alone do not fit; free 5.00 GiB; the host can hold them, but is slower",
                    8000,
                ),
                ("adapters", "finetuning only: gradients and states exist for adapters only", None),
            ],
        ),
        (
            replace(FULL, phase="optimizer", shapes={"params": 1000, "ranks": 1, "batch": 1}),
            [
                ("fused-step", "the peak is the optimizer's step, not activations; free 5.00 GiB", None),
                (
                    "optimizer-8bit",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch: 2 B of state "
                        "per parameter instead of 8"
                    ),
                    6000,
                ),
                (
                    "offload",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch; the host can "
                        "hold them, but is slower"
                    ),
                    8000,
                ),
                ("adapters", "finetuning only: gradients and states exist for adapters only", None),
            ],
        ),
        (
            replace(FULL, shapes={"params": 1000}, product=LOGITS),
            [
                (
                    "fused-loss",
                    "the request is the logits: a fused loss never holds all of them at once",
                    2 * GIB,
                ),
                ("micro-batch", "activations grow with the micro-batch; free 5.00 GiB", GIB),
                *ACTIVATIONS[1:],
                (
                    "optimizer-8bit",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch: 2 B of state "
                        "per parameter instead of 8"
                    ),
                    6000,
                ),
                (
                    "shard",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch; each of "
                        "several GPUs holds a share"
                    ),
                    None,
                ),
                (
                    "offload",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch; the host can "
                        "hold them, but is slower"
                    ),
                    8000,
                ),
                ("adapters", "finetuning only: gradients and states exist for adapters only", None),
            ],
        ),
        (
            replace(FULL, product=SCORES),
            [
                ("attention", "the request is attention scores, which need not be materialized", 2 * GIB),
                ("micro-batch", "activations grow with the micro-batch; free 5.00 GiB", GIB),
                (
                    "fused-loss",
                    "with a large vocabulary the loss is often the peak: 12 to 14 B per logit",
                    None,
                ),
                ("checkpointing", "keeps only the inputs of blocks and recomputes the rest", None),
                ("shorter", "activations grow with the length; this changes the task", None),
                (
                    "optimizer-8bit",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch: 2 B of state "
                        "per parameter instead of 8"
                    ),
                    None,
                ),
                (
                    "shard",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch; each of "
                        "several GPUs holds a share"
                    ),
                    None,
                ),
                (
                    "offload",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch; the host can "
                        "hold them, but is slower"
                    ),
                    None,
                ),
                ("adapters", "finetuning only: gradients and states exist for adapters only", None),
            ],
        ),
        (
            replace(FULL, product=OTHER, shapes={"batch": 2, "seq": 3, "hidden": 5, "layers": 7}),
            [
                ("micro-batch", "activations grow with the micro-batch; free 5.00 GiB", None),
                (
                    "fused-loss",
                    "with a large vocabulary the loss is often the peak: 12 to 14 B per logit",
                    None,
                ),
                ("checkpointing", "keeps only the inputs of blocks and recomputes the rest", 5760),
                (
                    "attention",
                    "keeps no attention scores in memory, if attention still materializes them",
                    None,
                ),
                ("shorter", "activations grow with the length; this changes the task", None),
                (
                    "optimizer-8bit",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch: 2 B of state "
                        "per parameter instead of 8"
                    ),
                    None,
                ),
                (
                    "shard",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch; each of "
                        "several GPUs holds a share"
                    ),
                    None,
                ),
                (
                    "offload",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch; the host can "
                        "hold them, but is slower"
                    ),
                    None,
                ),
                ("adapters", "finetuning only: gradients and states exist for adapters only", None),
            ],
        ),
        # What costs nothing first
        (
            replace(FULL, labels=("does_not_fit", "unknown", "driver_refused_though_free"), phase="setup"),
            [
                ("watch", "figures are cut off: confirm the cause first", None),
                ("check-driver", "the free memory barely covers the request", None),
                *weights_alone("; free 5.00 GiB"),
            ],
        ),
        (
            replace(
                device_case(
                    "does_not_fit",
                    free=GIB,
                    allocated=77 * GIB,
                    reserved_unallocated=GIB,
                    private_pools=2 * GIB,
                ),
                labels=("does_not_fit", "fragmentation", "private_pools"),
                phase="setup",
            ),
            [
                ("fewer-graphs", "2.00 GiB is free in pools of CUDA graphs", 2 * GIB),
                ("expandable", "1024.00 MiB is free in holes, requested 2.00 GiB", GIB),
                *weights_alone("; free 5.00 GiB"),
            ],
        ),
        (
            replace(FULL, labels=("does_not_fit", "fragmentation"), phase="setup", expandable=True),
            [
                ("bucket", "holes come from changing shapes; expandable segments are on already", None),
                *weights_alone("; free 5.00 GiB"),
            ],
        ),
        (
            replace(
                device_case("does_not_fit", "xpu-v2", free=GIB, allocated=77 * GIB, reserved_unallocated=GIB),
                labels=("does_not_fit", "fragmentation"),
                phase="setup",
            ),
            [*weights_alone("; free 5.00 GiB")],
        ),
        (
            replace(
                device_case("does_not_fit", free=GIB, allocated=70 * GIB, reserved_unallocated=GIB),
                labels=("does_not_fit", "other_process_or_outside_allocator"),
                phase="setup",
            ),
            [
                ("free-device", "8.00 GiB is outside this process's allocator", 7 * GIB),
                ("own-context", "on GPU 0 these bytes may be contexts of this job's own ranks", None),
                *weights_alone("; free 5.00 GiB"),
            ],
        ),
        (
            replace(
                device_case(
                    "does_not_fit",
                    free=GIB,
                    allocated=77 * GIB,
                    reserved_unallocated=GIB,
                    processes=[{"pid": 7, "in_use": GIB}, {"pid": 8, "in_use": 78 * GIB}],
                ),
                phase="setup",
            ),
            [
                (
                    "free-device",
                    "other processes hold 1024.00 MiB, and 1024.00 MiB is missing",
                    GIB,
                    "pid 7 (1024.00 MiB)",
                ),
                *weights_alone("; free 5.00 GiB"),
            ],
        ),
        (
            replace(
                device_case(
                    "does_not_fit",
                    free=GIB,
                    allocated=77 * GIB,
                    reserved_unallocated=GIB,
                    processes=[{"pid": 7, "in_use": GIB - 1}, {"pid": 8, "in_use": 78 * GIB}],
                ),
                phase="setup",
            ),
            [*weights_alone("; free 5.00 GiB")],
        ),
        (
            replace(device_case("does_not_fit", requested=81 * GIB, free=GIB), phase="setup"),
            [
                (
                    "find-size",
                    ("one tensor takes the whole device: see which sizes it is the product of (`--shapes`)"),
                    None,
                ),
                *weights_alone("; free 84.00 GiB"),
            ],
        ),
        (
            replace(device_case("does_not_fit", requested=80 * GIB, free=GIB), phase="setup"),
            [*weights_alone("; free 83.00 GiB")],
        ),
        (
            replace(device_case("does_not_fit", requested=81 * GIB, free=GIB), phase="setup", product=OTHER),
            [*weights_alone("; free 84.00 GiB")],
        ),
        (
            replace(device_case("does_not_fit", free=9 * GIB), phase="setup"),
            [*weights_alone("; free 0 bytes")],
        ),
        (
            replace(sizes_case("does_not_fit", "mps", "buffer", "mps", requested=48 * GIB), phase="setup"),
            [
                (
                    "find-size",
                    ("one tensor takes the whole device: see which sizes it is the product of (`--shapes`)"),
                    None,
                ),
                *weights_alone(""),
            ],
        ),
        (
            replace(
                sizes_case("does_not_fit", "mps", "", "mps", requested=48 * GIB),
                phase="setup",
                labels=("does_not_fit", "driver_refused_though_free"),
            ),
            [*weights_alone("")],
        ),
        # Who else has the device
        (
            OUTSIDE,
            [
                ("free-device", "48.00 GiB is outside this process's allocator", 47 * GIB),
                ("own-context", "on GPU 0 these bytes may be contexts of this job's own ranks", None),
            ],
        ),
        (
            device_case(
                "other_process_or_outside_allocator",
                free=GIB,
                allocated=30 * GIB,
                reserved_unallocated=GIB,
                processes=OTHERS,
            ),
            [
                ("free-device", "48.00 GiB is outside this process's allocator", 3 * GIB, "pid 7 (3.00 GiB)"),
                ("own-context", "on GPU 0 these bytes may be contexts of this job's own ranks", None),
            ],
        ),
        (
            device_case(
                "other_process_or_outside_allocator", free=0, allocated=79 * GIB, reserved_unallocated=GIB
            ),
            [
                ("free-device", "most is outside; even if all of it is freed, 1024.00 MiB is missing", None),
                ("own-context", "on GPU 0 these bytes may be contexts of this job's own ranks", None),
                ("micro-batch", "activations grow with the micro-batch; free 6.00 GiB", None),
                *ACTIVATIONS,
                (
                    "optimizer-8bit",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch: 2 B of state "
                        "per parameter instead of 8"
                    ),
                    None,
                ),
                (
                    "shard",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch; each of "
                        "several GPUs holds a share"
                    ),
                    None,
                ),
                (
                    "offload",
                    (
                        "weights, gradients and optimizer state do not shrink with the batch; the host can "
                        "hold them, but is slower"
                    ),
                    None,
                ),
                ("adapters", "finetuning only: gradients and states exist for adapters only", None),
            ],
        ),
        (
            replace(
                device_case(
                    "other_process_or_outside_allocator",
                    requested=60 * GIB,
                    free=GIB,
                    allocated=30 * GIB,
                    reserved_unallocated=GIB,
                ),
                phase="setup",
            ),
            [
                (
                    "free-device",
                    (
                        "48.00 GiB is outside this process's allocator; even if all of it is freed, 10.00 "
                        "GiB is missing"
                    ),
                    47 * GIB,
                ),
                ("own-context", "on GPU 0 these bytes may be contexts of this job's own ranks", None),
                *weights_alone("; free 63.00 GiB"),
            ],
        ),
        (
            replace(
                device_case(
                    "other_process_or_outside_allocator",
                    free=GIB,
                    allocated=30 * GIB,
                    reserved_unallocated=9 * GIB,
                ),
                labels=("other_process_or_outside_allocator", "fragmentation"),
            ),
            [
                ("free-device", "40.00 GiB is outside this process's allocator", 39 * GIB),
                ("own-context", "on GPU 0 these bytes may be contexts of this job's own ranks", None),
                ("expandable", "9.00 GiB is free in holes, requested 2.00 GiB", 9 * GIB),
            ],
        ),
        (
            device_case(
                "other_process_or_outside_allocator",
                free=GIB,
                allocated=30 * GIB,
                reserved_unallocated=GIB,
                this_process=55 * GIB,
            ),
            [
                ("free-device", "48.00 GiB is outside this process's allocator", 47 * GIB),
                ("own-context", "on GPU 0 these bytes may be contexts of this job's own ranks", None),
            ],
        ),
        (
            device_case(
                "other_process_or_outside_allocator",
                free=GIB,
                allocated=30 * GIB,
                reserved_unallocated=GIB,
                this_process=55 * GIB + 1,
            ),
            [
                (
                    "watch",
                    (
                        "this process itself has 24.00 GiB outside its allocator (libraries, NCCL, "
                        "graphs): the report shows at which step they appear"
                    ),
                    None,
                ),
                ("own-context", "on GPU 0 these bytes may be contexts of this job's own ranks", None),
            ],
        ),
        (
            sizes_case("other_process_or_outside_allocator", "cuda-v2", "", "cuda:1", requested=GIB),
            [("free-device", "most is outside", None)],
        ),
        (
            sizes_case("other_process_or_outside_allocator", "cuda-v2", "", None, requested=GIB),
            [
                ("free-device", "most is outside", None),
                ("own-context", "on GPU 0 these bytes may be contexts of this job's own ranks", None),
            ],
        ),
        (
            sizes_case("other_process_or_outside_allocator", "mps", "", "mps", other=GIB),
            [
                ("free-device", "1024.00 MiB of this process's Metal memory do not belong to PyTorch", None),
                ("metal-limit", "the limit includes them", None),
            ],
        ),
        (
            sizes_case("other_process_or_outside_allocator", "vllm", "startup", None),
            [
                ("free-device", "the engine found the device partly in use", None),
                ("lower-share", "a share that fits next to the others", None),
            ],
        ),
        # Holes, caps and refusals
        (
            HOLES,
            [
                ("expandable", "18.00 GiB is free in holes, requested 2.00 GiB", 18 * GIB),
                ("bucket", "changing shapes leave holes that later requests do not fit", None),
            ],
        ),
        (
            replace(
                device_case(
                    "fragmentation",
                    free=GIB,
                    allocated=60 * GIB,
                    reserved_unallocated=18 * GIB,
                    private_pools=3 * GIB,
                ),
                labels=("fragmentation", "private_pools", "does_not_fit"),
                phase="setup",
            ),
            [
                ("expandable", "18.00 GiB is free in holes, requested 2.00 GiB", 18 * GIB),
                ("bucket", "changing shapes leave holes that later requests do not fit", None),
                ("fewer-graphs", "3.00 GiB is free in pools of CUDA graphs", 3 * GIB),
                *weights_alone("; free 5.00 GiB"),
            ],
        ),
        (
            replace(HOLES, serving=True),
            [
                (
                    "leave-headroom",
                    "the share is of weights and cache; activations and graphs need more",
                    None,
                ),
                ("smaller-graphs", "each captured batch size keeps buffers of its own", None),
                (
                    "less-on-device",
                    "weights, cache and the requests at once are what an engine asks for",
                    None,
                ),
                ("expandable", "18.00 GiB is free in holes, requested 2.00 GiB", 18 * GIB),
            ],
        ),
        (
            device_case("private_pools", free=GIB, private_pools=3 * GIB),
            [("fewer-graphs", "3.00 GiB is free in CUDA graphs' pools: more than needed", 3 * GIB)],
        ),
        (
            device_case("allocator_limit", allowed=20 * GIB),
            [("raise-cap", "the cap is 20.00 GiB, the device has more", 60 * GIB)],
        ),
        (
            device_case("allocator_limit", total=None, allowed=20 * GIB),
            [("raise-cap", "the cap is 20.00 GiB", None)],
        ),
        (
            replace(sizes_case("allocator_limit", "mps", "", "mps", requested=GIB), shapes={"batch": 1}),
            [("metal-limit", "the limit is PyTorch's own, a multiple of what Metal recommends", None)],
        ),
        (
            replace(
                sizes_case("allocator_limit", "mps", "", "mps", requested=GIB),
                labels=("allocator_limit", "does_not_fit"),
                product=LOGITS,
            ),
            [
                ("metal-limit", "the limit is PyTorch's own, a multiple of what Metal recommends", None),
                ("micro-batch", "activations grow with the micro-batch", 512 * MIB),
                *ACTIVATIONS[1:],
            ],
        ),
        (
            sizes_case("allocator_limit", "vllm", "blocks", None),
            [
                (
                    "raise-cap",
                    "weights and the profiling run use up the share of gpu_memory_utilization",
                    None,
                ),
                ("less-on-device", "a lower max_model_len makes the profiling run smaller", None),
            ],
        ),
        (
            sizes_case("allocator_limit", "engine", "share", None),
            [
                ("raise-cap", "the engine's share is used up; the device may have more", None),
                ("less-on-device", "a shorter context or fewer requests at once use less of the share", None),
            ],
        ),
        (
            device_case("driver_refused_though_free", free=60 * GIB),
            [
                ("check-driver", "the driver refused although the device has free memory", None),
                ("split-request", "one piece of 2.00 GiB was refused; smaller ones may succeed", None),
            ],
        ),
        (
            replace(
                device_case("driver_refused_though_free", free=60 * GIB, reserved_unallocated=3 * GIB),
                labels=("driver_refused_though_free", "allocator_limit", "fragmentation"),
            ),
            [
                ("raise-cap", "the process is also close to its cap", None),
                ("check-driver", "the driver refused although the device has free memory", None),
                ("split-request", "one piece of 2.00 GiB was refused; smaller ones may succeed", None),
                ("expandable", "3.00 GiB is free in holes, requested 2.00 GiB", 3 * GIB),
            ],
        ),
        (
            sizes_case("driver_refused_though_free", "allocation", "failed", None, requested=GIB),
            [
                ("check-driver", "the driver refused although the device has free memory", None),
                ("less-on-device", "smaller buffers may succeed", None),
            ],
        ),
        (
            replace(device_case("system_memory_fallback", allocated=90 * GIB), phase="setup"),
            [
                (
                    "no-fallback",
                    "the card is over-full, and the driver hides it by using the host's memory",
                    None,
                ),
                *weights_alone("; free 12.00 GiB"),
            ],
        ),
        (
            replace(device_case("system_memory_fallback", free=GIB), phase="setup"),
            [
                (
                    "no-fallback",
                    "the card is over-full, and the driver hides it by using the host's memory",
                    None,
                ),
                *weights_alone(""),
            ],
        ),
        (
            device_case("absurd_request", requested=2**47),
            [("find-size", "the size is garbage; no memory setting can help", None)],
        ),
        # Without figures
        (
            sizes_case("unknown", "cuda-runtime", "", None),
            [("watch", "the message has no sizes: find out what asked, and what was alive", None)],
        ),
        (
            sizes_case("unknown", "cuda-driver", "", None),
            [("watch", "the message has no sizes: find out what asked, and what was alive", None)],
        ),
        (
            sizes_case("unknown", "xpu-runtime", "", None),
            [("watch", "the message has no sizes: find out what asked, and what was alive", None)],
        ),
        (
            sizes_case("unknown", "nvml-assert", "", None),
            [("watch", "the message lost its figures: find out what was alive at the failure", None)],
        ),
        (
            sizes_case("unknown", "cuda-v2", "", None),
            [("watch", "the text has too few figures to find the cause", None)],
        ),
        (
            sizes_case("unknown", "mention", "", None),
            [("read-on", "this line alone does not show whose memory ran out", None)],
        ),
        (
            sizes_case("unknown", "allocation", "", None),
            [
                ("free-device", "the text does not show what uses the rest of the device", None),
                ("less-on-device", "weights, caches and the batch are what such a program allocates", None),
            ],
        ),
        (
            sizes_case("does_not_fit", "allocation", "failed", "tpu", requested=GIB),
            [("less-on-device", "weights, caches and the batch are what such a program allocates", None)],
        ),
        (
            replace(
                sizes_case("does_not_fit", "allocation", "failed", None, requested=GIB),
                labels=("does_not_fit", "unknown"),
            ),
            [
                ("free-device", "the text does not show what uses the rest of the device", None),
                ("less-on-device", "weights, caches and the batch are what such a program allocates", None),
            ],
        ),
        (
            sizes_case("does_not_fit", "engine", "batch", None),
            [("less-on-device", "weights, caches and the batch are what such a program allocates", None)],
        ),
        (
            sizes_case("does_not_fit", "vllm", "length", None),
            [
                ("raise-cap", "a larger share of the device holds a longer sequence", None),
                ("less-on-device", "a lower max_model_len needs less key-value cache for a sequence", None),
            ],
        ),
        (
            sizes_case("library_alloc_failed", "cublas", "", None),
            [
                (
                    "headroom",
                    "the library asks the driver after the allocator has reserved most of the device",
                    None,
                ),
                ("own-context", "a second context on a device takes what the library needed", None),
                ("free-device", "other processes may fill the device", None),
            ],
        ),
        (
            sizes_case("library_alloc_failed", "cudnn", "not initialized", None),
            [
                (
                    "headroom",
                    "the library asks the driver after the allocator has reserved most of the device",
                    None,
                ),
                ("own-context", "a second context on a device takes what the library needed", None),
                ("free-device", "other processes may fill the device", None),
            ],
        ),
        (
            sizes_case("library_alloc_failed", "nccl", "", None),
            [
                (
                    "headroom",
                    "the library asks the driver after the allocator has reserved most of the device",
                    None,
                ),
                ("own-context", "a second context on a device takes what the library needed", None),
            ],
        ),
        (
            sizes_case("library_alloc_failed", "nccl", "multicast", None),
            [
                (
                    "headroom",
                    "the library asks the driver after the allocator has reserved most of the device",
                    None,
                ),
                ("own-context", "a second context on a device takes what the library needed", None),
            ],
        ),
        (
            sizes_case("library_alloc_failed", "tensorrt", "", None),
            [
                ("free-device", "the text does not show what uses the rest of the device", None),
                ("less-on-device", "weights, caches and the batch are what such a program allocates", None),
            ],
        ),
    ],
)
def test_what_helps_a_full_device(case: Case, told: list[Told]) -> None:
    assert fixes(case) == [fix(each) for each in told]


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (
            text_case("host_memory_limit", "kernel-oom", comm="python3"),
            [
                ("fewer-workers", "each worker holds its own copies and prefetched batches", None),
                ("lazy-data", "a copy of the data in each rank and worker is a common cause", None),
                ("host-limit", "if the job needs that much", None),
            ],
        ),
        (
            text_case("host_memory_limit", "kernel-oom", comm="cc1plus"),
            [
                ("largest-process", "the killed process may not be the largest one", None),
                ("lazy-data", "a copy of the data in each process is a common cause", None),
                ("host-limit", "if the job needs that much", None),
            ],
        ),
        (
            text_case("host_memory_limit", "kernel-oom", comm="pt_data_worker"),
            [
                ("fewer-workers", "each worker holds its own copies and prefetched batches", None),
                ("lazy-data", "a copy of the data in each rank and worker is a common cause", None),
                ("host-limit", "if the job needs that much", None),
            ],
        ),
        (
            replace(text_case("host_memory_limit", "kernel-oom"), traits={"builds"}),
            [
                ("build-jobs", "compilers that run at once take some GiB each", None),
                ("host-limit", "if the job needs that much", None),
            ],
        ),
        (
            text_case("host_memory_limit", "slurm"),
            [
                ("fewer-workers", "each worker holds its own copies and prefetched batches", None),
                ("lazy-data", "a copy of the data in each rank and worker is a common cause", None),
                ("host-limit", "if the job needs that much", None),
            ],
        ),
        (
            text_case("host_memory_limit", "notebook"),
            [
                ("lazy-data", "a copy of the data in each rank and worker is a common cause", None),
                ("host-limit", "if the job needs that much", None),
            ],
        ),
        (
            text_case("host_memory_limit", "oomd"),
            [
                ("largest-process", "the killed process may not be the largest one", None),
                ("lazy-data", "a copy of the data in each process is a common cause", None),
                ("host-limit", "if the job needs that much", None),
            ],
        ),
        (
            sizes_case("host_memory_limit", "ray", node_used=9 * GIB, task_used=GIB),
            [
                ("largest-process", "the killed task had 1024.00 MiB of the 9.00 GiB in use", None),
                ("lazy-data", "a copy of the data in each process is a common cause", None),
                ("host-limit", "if the job needs that much", None),
            ],
        ),
        (
            sizes_case("host_memory_limit", "ray", node_used=9 * GIB),
            [
                ("largest-process", "the killed process may not be the largest one", None),
                ("lazy-data", "a copy of the data in each process is a common cause", None),
                ("host-limit", "if the job needs that much", None),
            ],
        ),
        (
            sizes_case("host_alloc_failed", "python-alloc", "segment", requested=GIB),
            [
                (
                    "map-count",
                    "each shared tensor is a mapping; the default limit is 65,530 per process",
                    None,
                ),
                ("commit-limit", "the kernel may be at its commit limit", None),
            ],
        ),
        (
            sizes_case("host_alloc_failed", "python-alloc", "file", requested=GIB),
            [
                ("commit-limit", "the mapping is committed in full", None),
                ("host-limit", "if the file has to be in memory", None),
            ],
        ),
        (
            sizes_case("host_alloc_failed", "python-alloc", "fork", requested=GIB),
            [
                ("fork-early", "a fork has to be granted as much as the process has", None),
                ("commit-limit", "the kernel commits less than it could provide", None),
                ("fewer-workers", "each worker is a fork", None),
            ],
        ),
        (
            sizes_case("host_alloc_failed", "python-alloc", "errno", requested=GIB),
            [
                ("largest-process", "other processes leave less host memory free", None),
                ("commit-limit", "the kernel may commit less than it could provide", None),
                ("host-limit", "if the job needs that much", None),
            ],
        ),
        (
            sizes_case("host_alloc_failed", "python-alloc", "commit", requested=GIB),
            [
                ("commit-limit", "RAM and page file together are the commit limit", None),
                ("fewer-workers", "each process that loads the CUDA libraries commits some GiB", None),
            ],
        ),
        (
            sizes_case("host_alloc_failed", "python-alloc", "worker", requested=GIB),
            [
                ("fewer-workers", "the failed allocation was in a worker", None),
                ("chunk-host", "one request of 1024.00 MiB was more than the host could provide", GIB),
                ("lazy-data", "the process's other data leaves less memory free", None),
                ("host-limit", "if the job needs that much", None),
            ],
        ),
        (
            sizes_case("host_alloc_failed", "cpu-alloc", requested=64 * MIB),
            [
                ("chunk-host", "one request of 64.00 MiB was more than the host could provide", 64 * MIB),
                ("lazy-data", "the process's other data leaves less memory free", None),
                ("host-limit", "if the job needs that much", None),
            ],
        ),
        (
            sizes_case("host_alloc_failed", "cpu-alloc", requested=64 * MIB - 1),
            [
                ("largest-process", "a request of 64.00 MiB did not fill the host alone", None),
                ("lazy-data", "the process's other data leaves less memory free", None),
                ("host-limit", "if the job needs that much", None),
            ],
        ),
        (
            sizes_case("host_alloc_failed", "cpu-alloc"),
            [
                ("chunk-host", "the request was more than the host could provide", None),
                ("lazy-data", "the process's other data leaves less memory free", None),
                ("host-limit", "if the job needs that much", None),
            ],
        ),
        (
            sizes_case("host_alloc_failed", "allocation", "failed", requested=GIB),
            [
                ("largest-process", "other processes leave less host memory free", None),
                ("less-on-host", "weights and caches are what such a program allocates", None),
                ("host-limit", "if the job needs that much", None),
            ],
        ),
        (
            text_case("shared_memory_exhausted", "shm"),
            [
                ("larger-shm", "workers and NCCL pass data through /dev/shm", None),
                ("fewer-workers", "if workers fill it: fewer batches are in flight at once", None),
            ],
        ),
        (
            text_case("killed_unproven", "launcher", "killed"),
            [("prove-kill", "a signal alone does not show its sender or reason", None)],
        ),
        (
            replace(text_case("killed_unproven", "launcher", "killed"), traits={"builds"}),
            [
                ("prove-kill", "a signal alone does not show its sender or reason", None),
                ("build-jobs", "if memory was the reason: compilers that run at once use it", None),
            ],
        ),
        (text_case("not_memory", "not-memory", "disk"), []),
        (text_case("informational", "engine", "report"), []),
    ],
)
def test_what_helps_the_host(case: Case, told: list[Told]) -> None:
    assert fixes(case) == [fix(each) for each in told]
