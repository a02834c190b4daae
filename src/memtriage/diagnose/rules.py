"""What a message proves: its label, and the labels that it cannot rule out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from memtriage.diagnose.figures import POLICY, judge_figures
from memtriage.diagnose.messages.message import Family, Message, figures
from memtriage.model.explanation import Label

_OTHERS: Final[Label] = "other_process_or_outside_allocator"

_TEXTS: Final[Mapping[tuple[Family, str], tuple[Label, ...]]] = {
    ("cuda-runtime", ""): ("unknown", "pinned_host", "does_not_fit"),
    ("cuda-runtime", "thc"): ("unknown", "does_not_fit", _OTHERS),
    ("cuda-driver", ""): ("unknown", "does_not_fit"),
    ("cuda-driver", "engine pool"): ("unknown", "does_not_fit", _OTHERS),
    ("cuda-driver", "hidden"): ("unknown", "does_not_fit"),
    ("xpu-runtime", ""): ("unknown", "does_not_fit"),
    ("nvml-assert", ""): ("unknown", "does_not_fit"),
    ("alloc-assert", ""): ("not_memory",),
    ("alloc-assert", "other"): ("not_memory", "unknown"),
    ("cublas", ""): ("library_alloc_failed", "does_not_fit"),
    ("cublas", "not initialised"): ("library_alloc_failed", "unknown", "not_memory"),
    ("cudnn", ""): ("library_alloc_failed", "does_not_fit"),
    ("cudnn", "not initialised"): ("library_alloc_failed", "unknown", "not_memory"),
    ("nccl", ""): ("library_alloc_failed", "does_not_fit"),
    ("nccl", "multicast"): ("library_alloc_failed", "not_memory"),
    ("cpu-alloc", ""): ("host_alloc_failed",),
    ("python-alloc", ""): ("host_alloc_failed",),
    ("python-alloc", "worker"): ("host_alloc_failed",),
    ("kernel-oom", ""): ("host_memory_limit",),
    ("kernel-oom", "cgroup"): ("host_memory_limit",),
    ("slurm", ""): ("host_memory_limit",),
    ("k8s", ""): ("host_memory_limit",),
    ("k8s", "eviction"): ("host_memory_limit",),
    ("ray", ""): ("host_memory_limit",),
    ("launcher", "killed"): ("killed_unproven", "host_memory_limit"),
    # SIGTERM: no out-of-memory killer sends it.
    ("launcher", "terminated"): ("killed_unproven", "not_memory", "unknown"),
    ("dataloader-killed", "killed"): ("killed_unproven", "host_memory_limit"),
    ("dataloader-killed", "terminated"): ("killed_unproven", "not_memory", "unknown"),
    ("dataloader-killed", "exited"): ("killed_unproven", "host_memory_limit", "shared_memory_exhausted"),
    ("shm", ""): ("shared_memory_exhausted",),
    ("shm", "opening"): ("shared_memory_exhausted", "unknown"),
    # The object is gone (a clean-up race), or the process has too many files open.
    ("shm", "gone"): ("not_memory", "unknown"),
    ("shm", "descriptors"): ("not_memory", "unknown"),
    ("vllm", "blocks"): ("allocator_limit", "does_not_fit"),
    ("vllm", "startup"): (_OTHERS, "allocator_limit"),
    ("vllm", "length"): ("does_not_fit", "allocator_limit"),
    ("vllm", "breakdown"): ("informational",),
    ("deepspeed-mem", ""): ("informational",),
}

_BUFFER: Final[tuple[Label, ...]] = ("does_not_fit", "driver_refused_though_free", "allocator_limit")
_METAL_OTHERS_SHARE: Final = 0.4
_CUT_UNIT: Final = 1024**3


def judge(message: Message) -> tuple[Label, ...]:
    """What a message proves, then what it cannot rule out, the likelier first: one to three labels.

    Empty for what other processes say when one has died.
    """
    requested = message.number("requested")
    if "absurd" in message.facts or (requested is not None and requested >= POLICY.absurd):
        return ("absurd_request",)
    if message.family == "mps":
        return _judge_metal(message)
    if message.family in ("cuda-v1", "cuda-v2", "cuda-async", "hip-v2", "xpu-v1", "xpu-v2"):
        return ("does_not_fit", "unknown") if _fills_the_card(message) else judge_figures(figures(message))
    if message.family == "not-memory":
        return ("not_memory",)
    return _TEXTS.get((message.family, message.form), ())


def _judge_metal(message: Message) -> tuple[Label, ...]:
    """On Metal the limit is one that PyTorch sets itself, and other allocations count against it."""
    if message.form == "buffer":
        return _BUFFER
    allocated, other = message.number("allocated"), message.number("other")
    if allocated is not None and other is not None and other > allocated:
        return (_OTHERS, "allocator_limit")
    labels: tuple[Label, ...] = ("allocator_limit", "does_not_fit")
    if "max_allowed" not in message.fields and not message.missing:
        labels = ("does_not_fit", "allocator_limit")  # the limit is switched off
    if allocated is not None and other is not None and other >= _METAL_OTHERS_SHARE * (allocated + other):
        labels = (*labels, _OTHERS)
    return labels


def _fills_the_card(message: Message) -> bool:
    """Whether the text ends inside of the allocated bytes, and these, in GiB, fill the device."""
    cut, total, free = message.facts.get("allocated_cut"), message.number("total"), message.number("free")
    requested = message.number("requested")
    if not isinstance(cut, str) or total is None or free is None or requested is None or free >= requested:
        return False
    allocated = float(cut.replace(",", "")) * _CUT_UNIT
    return POLICY.live * total <= allocated <= total
