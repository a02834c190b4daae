"""What a message proves: its label, and the labels that it cannot rule out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from memtriage.messages.figures import POLICY, judge_figures
from memtriage.messages.grammar.message import ALLOCATORS, Family, Message, figures
from memtriage.model.explanation import Label
from memtriage.model.units import GIB

_OTHERS: Final[Label] = "other_process_or_outside_allocator"

_TEXTS: Final[Mapping[tuple[Family, str], tuple[Label, ...]]] = {
    ("cuda-runtime", ""): ("unknown", "pinned_host", "does_not_fit"),
    ("cuda-runtime", "thc"): ("unknown", "does_not_fit", _OTHERS),
    ("cuda-driver", ""): ("unknown", "does_not_fit"),
    ("cuda-driver", "engine pool"): ("unknown", "does_not_fit", _OTHERS),
    # At the first start nothing else was there; now the trainer on the same device is.
    ("cuda-driver", "engine wakes"): (_OTHERS, "unknown", "does_not_fit"),
    ("cuda-driver", "kernel module"): ("unknown", "host_alloc_failed", _OTHERS),
    ("cuda-driver", "hidden"): ("unknown", "does_not_fit"),
    ("xpu-runtime", ""): ("unknown", "does_not_fit"),
    ("nvml-assert", ""): ("unknown", "does_not_fit"),
    ("alloc-assert", ""): ("not_memory",),
    ("alloc-assert", "other"): ("not_memory", "unknown"),
    ("cublas", ""): ("library_alloc_failed", "does_not_fit"),
    ("cublas", "not initialized"): ("library_alloc_failed", "unknown", "not_memory"),
    ("cudnn", ""): ("library_alloc_failed", "does_not_fit"),
    ("cudnn", "not initialized"): ("library_alloc_failed", "unknown", "not_memory"),
    ("nccl", ""): ("library_alloc_failed", "does_not_fit"),
    ("nccl", "multicast"): ("library_alloc_failed", "not_memory"),
    ("tensorrt", ""): ("library_alloc_failed", "does_not_fit"),
    ("tensorrt", "tactic"): ("informational",),
    ("cpu-alloc", ""): ("host_alloc_failed",),
    ("python-alloc", ""): ("host_alloc_failed",),
    ("python-alloc", "worker"): ("host_alloc_failed",),
    ("python-alloc", "fork"): ("host_alloc_failed",),
    ("python-alloc", "errno"): ("host_alloc_failed",),
    ("python-alloc", "commit"): ("host_alloc_failed",),
    ("python-alloc", "file"): ("host_alloc_failed",),
    ("python-alloc", "segment"): ("host_alloc_failed", "shared_memory_exhausted"),
    ("kernel-oom", ""): ("host_memory_limit",),
    ("kernel-oom", "cgroup"): ("host_memory_limit",),
    ("slurm", ""): ("host_memory_limit",),
    ("k8s", ""): ("host_memory_limit",),
    ("k8s", "eviction"): ("host_memory_limit",),
    # Somebody's words for it, and not the runtime's own reason.
    ("k8s", "told"): ("host_memory_limit", "killed_unproven"),
    # The runtime may miss a kill of the kernel's, or of a process that is not the container's first.
    ("k8s", "denied"): ("killed_unproven", "host_memory_limit", "not_memory"),
    ("ray", ""): ("host_memory_limit",),
    ("ray", "perhaps"): ("killed_unproven", "host_memory_limit"),
    ("oomd", ""): ("host_memory_limit",),
    ("notebook", ""): ("host_memory_limit",),
    ("launcher", "killed"): ("killed_unproven", "host_memory_limit"),
    # SIGTERM: users, schedulers and launchers send it, and so do earlyoom and an eviction by Kubernetes.
    ("launcher", "terminated"): ("killed_unproven", "not_memory", "unknown"),
    ("launcher", "asked"): ("not_memory", "unknown"),
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
    ("engine", "share"): ("allocator_limit", "does_not_fit"),
    ("engine", "batch"): ("does_not_fit", "allocator_limit"),
    ("engine", "pool"): ("allocator_limit", "does_not_fit"),
    ("engine", "preempted"): ("informational",),
    ("engine", "report"): ("informational",),
    ("engine", "weights"): ("informational",),
    ("python", "resource tracker"): ("informational",),
    ("not-memory", "no space"): ("not_memory", "shared_memory_exhausted"),
    ("mention", ""): ("unknown",),
    ("mention", "survived"): ("informational",),
    ("deepspeed-mem", "flushes"): ("informational",),
    ("deepspeed-mem", ""): ("informational",),
}

_BUFFER: Final[tuple[Label, ...]] = ("does_not_fit", "driver_refused_though_free", "allocator_limit")
_METAL_OTHERS_SHARE: Final = 0.4
_CUT_UNIT: Final = GIB


def judge(message: Message) -> tuple[Label, ...]:
    """Return what a message proves, then what it cannot rule out, the likelier first: one to three labels.

    Empty for what other processes say when one has died.
    """
    requested = message.number("requested") or _shape_bytes(message)
    if "absurd" in message.facts or (requested is not None and requested >= POLICY.absurd):
        return ("absurd_request",)
    if message.family == "mps":
        return _judge_metal(message)
    if message.family == "allocation":
        return _judge_allocation(message)
    if message.family in ALLOCATORS:
        return ("does_not_fit", "unknown") if _fills_the_card(message) else judge_figures(figures(message))
    labels = _TEXTS.get((message.family, message.form), ())
    return ("not_memory",) if not labels and message.family == "not-memory" else labels


def _judge_allocation(message: Message) -> tuple[Label, ...]:
    """What the figures of any runtime's failed allocation prove; most do not say who has the rest."""
    if message.form == "survived":
        return ("informational",)
    requested, used, free = (message.number(name) for name in ("requested", "used", "free"))
    total, cap, largest = (message.number(name) for name in ("total", "allowed", "max_buffer"))
    asked = requested or _shape_bytes(message) or 0
    if total is not None and max(asked, used or 0) > total:
        return ("does_not_fit",)
    if message.form == "single":
        return _BUFFER if largest is None or asked > largest else ("unknown", "does_not_fit")
    if cap is not None and (message.number("allocated") or 0) + asked > cap:
        return ("allocator_limit", "does_not_fit")
    if message.device == "host":
        too_much = free is not None and asked > free
        return ("does_not_fit", "host_alloc_failed") if too_much else ("host_alloc_failed",)
    if free is not None and asked > free:
        return ("does_not_fit", "unknown")  # who has the rest is not told
    if free is not None and free - asked >= POLICY.full:
        return ("driver_refused_though_free", "unknown")
    return ("unknown", "does_not_fit", _OTHERS)


def _shape_bytes(message: Message) -> int | None:
    """Return the request where the message gives a shape instead of a size."""
    size = message.facts.get("shape_bytes")
    return size if isinstance(size, int) else None


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
