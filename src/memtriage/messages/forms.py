"""The forms of messages without figures: what each proves, and why. One row per form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from memtriage.messages.grammar.message import Family
from memtriage.model.explanation import Label

_OTHERS: Final[Label] = "other_process_or_outside_allocator"


class MessageForm(NamedTuple):
    """What a form of a message proves by its words.

    Attributes:
        labels: what it proves, then what it cannot rule out; empty where its figures decide.
        why: what that rests on; empty where its figures say it.
    """

    labels: tuple[Label, ...] = ()
    why: str = ""


FORMS: Final[Mapping[tuple[Family, str], MessageForm]] = {
    ("cuda-runtime", ""): MessageForm(
        ("unknown", "pinned_host", "does_not_fit"),
        "no sizes: the call that failed was probably not the caching allocator's (but pinned host"
        " memory, a new context, a captured graph, a library), or the error is of an earlier call",
    ),
    ("cuda-runtime", "thc"): MessageForm(
        ("unknown", "does_not_fit", _OTHERS), "a release of PyTorch up to 0.4, whose message has no sizes"
    ),
    ("cuda-driver", ""): MessageForm(("unknown", "does_not_fit"), "the driver's own error, without sizes"),
    ("cuda-driver", "engine pool"): MessageForm(
        ("unknown", "does_not_fit", _OTHERS),
        "an engine's own memory pool got nothing from the driver; no sizes",
    ),
    # At the first start nothing else was there; now the trainer on the same device is.
    ("cuda-driver", "engine wakes"): MessageForm(
        (_OTHERS, "unknown", "does_not_fit"),
        "the engine got its memory at the start and not again when it woke up: the trainer on the"
        " same device still has its own",
    ),
    ("cuda-driver", "kernel module"): MessageForm(
        ("unknown", "host_alloc_failed", _OTHERS),
        "the GPU's kernel driver got no memory, which may be the host's",
    ),
    ("cuda-driver", "hidden"): MessageForm(
        ("unknown", "does_not_fit"),
        "this error of the driver can be a failed allocation that never says memory",
    ),
    ("xpu-runtime", ""): MessageForm(("unknown", "does_not_fit"), "the runtime's own error, without sizes"),
    ("nvml-assert", ""): MessageForm(
        ("unknown", "does_not_fit"),
        "the allocation had failed already; then composing its message failed, because NVML gave "
        "no answer (MIG slices, containers): its numbers are lost",
    ),
    ("alloc-assert", ""): MessageForm(
        ("not_memory",),
        "two settings of the allocator conflict (expandable_segments with max_split_size_mb or "
        "IPC): no memory ran out",
    ),
    ("alloc-assert", "other"): MessageForm(
        ("not_memory", "unknown"),
        "a check inside the allocator failed: a defect or conflicting settings, and no sign that "
        "memory ran out",
    ),
    ("cublas", ""): MessageForm(
        ("library_alloc_failed", "does_not_fit"),
        "the library got no memory from the driver for its handle or workspace",
    ),
    ("cublas", "not initialized"): MessageForm(
        ("library_alloc_failed", "unknown", "not_memory"),
        "often the library got no memory for its handle; a driver or version mismatch gives the same message",
    ),
    ("cudnn", ""): MessageForm(
        ("library_alloc_failed", "does_not_fit"),
        "the library got no memory from the driver for its workspace",
    ),
    ("cudnn", "not initialized"): MessageForm(
        ("library_alloc_failed", "unknown", "not_memory"),
        "often the library got no memory for its handle; a driver or version mismatch gives the same message",
    ),
    ("nccl", ""): MessageForm(
        ("library_alloc_failed", "does_not_fit"), "NCCL got no memory from the driver for its buffers"
    ),
    ("nccl", "multicast"): MessageForm(
        ("library_alloc_failed", "not_memory"),
        "multicast reservations ran out (communicators never destroyed): the device may have free memory",
    ),
    ("tensorrt", ""): MessageForm(
        ("library_alloc_failed", "does_not_fit"), "TensorRT got no memory from the driver"
    ),
    ("tensorrt", "tactic"): MessageForm(
        ("informational",), "the builder skipped a tactic that did not fit and went on with others"
    ),
    ("cpu-alloc", ""): MessageForm(
        ("host_alloc_failed",), "a host allocation failed: GPU memory is not involved"
    ),
    ("python-alloc", ""): MessageForm(
        ("host_alloc_failed",), "a host allocation failed: GPU memory is not involved"
    ),
    ("python-alloc", "worker"): MessageForm(
        ("host_alloc_failed",), "a host allocation failed in a DataLoader worker: GPU memory is not involved"
    ),
    ("python-alloc", "fork"): MessageForm(
        ("host_alloc_failed",),
        "a fork copies the process's address space, and the kernel would not commit that much: "
        "the larger the process, the more memory a fork has to be granted",
    ),
    ("python-alloc", "errno"): MessageForm(
        ("host_alloc_failed",),
        "the kernel refused memory (errno 12); the text does not say for what: a fork, a mapping or an array",
    ),
    ("python-alloc", "commit"): MessageForm(
        ("host_alloc_failed",),
        "Windows commits no more than RAM and page file together; model files that are mapped and"
        " the CUDA libraries of each process count in full",
    ),
    ("python-alloc", "file"): MessageForm(
        ("host_alloc_failed",),
        "the file could not be mapped: a writable mapping is committed in full, however little of it is read",
    ),
    ("python-alloc", "segment"): MessageForm(
        ("host_alloc_failed", "shared_memory_exhausted"),
        "each tensor shared between processes is a mapping: a small request fails when the number"
        " of mappings reaches vm.max_map_count, not because memory ran out",
    ),
    ("kernel-oom", ""): MessageForm(("host_memory_limit",)),
    ("kernel-oom", "cgroup"): MessageForm(("host_memory_limit",)),
    ("slurm", ""): MessageForm(
        ("host_memory_limit",),
        "the scheduler reports that the kernel's out-of-memory killer killed a process of this job",
    ),
    ("k8s", ""): MessageForm(
        ("host_memory_limit",), "the container was killed at its memory limit (OOMKilled)"
    ),
    ("k8s", "eviction"): MessageForm(
        ("host_memory_limit",),
        "the node ran low on memory and evicted the pod: the pod's own limit was not the reason",
    ),
    # Somebody's words for it, and not the runtime's own reason.
    ("k8s", "told"): MessageForm(
        ("host_memory_limit", "killed_unproven"),
        "the text calls it killed for its memory; the container runtime's own reason is missing",
    ),
    # The runtime may miss a kill of the kernel's, or of a process that is not the container's first.
    ("k8s", "denied"): MessageForm(
        ("killed_unproven", "host_memory_limit", "not_memory"),
        "OOMKilled is false: the container runtime does not record its memory limit as the reason"
        " of the SIGKILL; the host's out-of-memory killer, an orchestrator or a user may have "
        "sent it",
    ),
    ("ray", ""): MessageForm(
        ("host_memory_limit",),
        "Ray's memory monitor killed the worker: the node's host memory, not the GPU's",
    ),
    ("ray", "perhaps"): MessageForm(
        ("killed_unproven", "host_memory_limit"), "a worker died; Ray lists possible reasons and knows none"
    ),
    ("oomd", ""): MessageForm(
        ("host_memory_limit",),
        "a memory monitor (systemd-oomd, earlyoom, Dask) killed it before the kernel had to",
    ),
    ("notebook", ""): MessageForm(
        ("host_memory_limit",), "the notebook service reports that the host's memory was used up"
    ),
    ("launcher", "killed"): MessageForm(
        ("killed_unproven", "host_memory_limit"),
        "many programs send SIGKILL; nothing in the text shows that memory was the reason",
    ),
    # SIGTERM: users, schedulers and launchers send it, and so do earlyoom and an eviction by Kubernetes.
    ("launcher", "terminated"): MessageForm(
        ("killed_unproven", "not_memory", "unknown"),
        "SIGTERM asks a process to end: users, schedulers and launchers send it, and of the out-"
        "of-memory killers only earlyoom and an eviction by Kubernetes",
    ),
    ("launcher", "asked"): MessageForm(
        ("not_memory", "unknown"),
        "SIGTERM asked the program to end: nothing shows that memory was the reason",
    ),
    ("dataloader-killed", "killed"): MessageForm(
        ("killed_unproven", "host_memory_limit"),
        "a worker got SIGKILL; nothing in the text shows that memory was the reason",
    ),
    ("dataloader-killed", "terminated"): MessageForm(
        ("killed_unproven", "not_memory", "unknown"),
        "a worker got SIGTERM: its parent, a user or a scheduler sends it, and of the out-of-"
        "memory killers only earlyoom and an eviction by Kubernetes",
    ),
    ("dataloader-killed", "exited"): MessageForm(
        ("killed_unproven", "host_memory_limit", "shared_memory_exhausted"),
        "a worker died; nothing in the text shows why",
    ),
    ("shm", ""): MessageForm(
        ("shared_memory_exhausted",), "a write to shared memory (/dev/shm) found no room"
    ),
    ("shm", "opening"): MessageForm(
        ("shared_memory_exhausted", "unknown"),
        "a shared-memory object could not be opened; the text has no errno",
    ),
    # The object is gone (a clean-up race), or the process has too many files open.
    ("shm", "gone"): MessageForm(
        ("not_memory", "unknown"),
        "the shared-memory object no longer exists (errno 2): a race at clean-up, not memory",
    ),
    ("shm", "descriptors"): MessageForm(
        ("not_memory", "unknown"), "too many open files (errno 24): file descriptors ran out, not memory"
    ),
    ("vllm", "blocks"): MessageForm(
        ("allocator_limit", "does_not_fit"),
        "weights and the profiling run take all of the share that the engine may use",
    ),
    ("vllm", "startup"): MessageForm((_OTHERS, "allocator_limit")),
    ("vllm", "length"): MessageForm(
        ("does_not_fit", "allocator_limit"),
        "one sequence of full length does not fit into the key-value cache",
    ),
    ("vllm", "breakdown"): MessageForm(
        ("informational",), "a report of memory at start-up (CUDA graphs are not in it), no failure"
    ),
    ("engine", "share"): MessageForm(
        ("allocator_limit", "does_not_fit"),
        "weights use up the engine's share of the device: the device may have free memory",
    ),
    ("engine", "batch"): MessageForm(
        ("does_not_fit", "allocator_limit"),
        "the batch that the engine has to hold does not fit next to the weights",
    ),
    ("engine", "pool"): MessageForm(
        ("allocator_limit", "does_not_fit"),
        "a pool that the program reserves for itself is full: its share, not the device",
    ),
    ("engine", "preempted"): MessageForm(
        ("informational",), "the key-value cache is full for the moment: requests wait, and nothing fails"
    ),
    ("engine", "report"): MessageForm(("informational",), "a report of memory at start-up, no failure"),
    ("engine", "weights"): MessageForm(("informational",), "a report of memory at start-up, no failure"),
    ("python", "resource tracker"): MessageForm(
        ("informational",),
        "Python lists what was left open at its exit and cleans it up: this is not the cause of a failure",
    ),
    ("not-memory", "no space"): MessageForm(
        ("not_memory", "shared_memory_exhausted"),
        "a file system is full; the text does not say which one: /dev/shm and /tmp may be in memory",
    ),
    ("not-memory", "device error"): MessageForm(
        (), "a kernel failed on the device (an index out of range, an invalid address): no memory ran out"
    ),
    ("not-memory", "disk"): MessageForm(
        (), "a file could not be written: the disk or a quota is full, not memory"
    ),
    ("not-memory", "illegal access"): MessageForm(
        (), "a kernel read or wrote outside its tensors: no memory ran out"
    ),
    ("not-memory", "on-chip shared memory"): MessageForm(
        (),
        "a kernel needs more of the GPU's on-chip memory than a block can have: device memory is "
        "not involved",
    ),
    ("not-memory", "static TLS"): MessageForm(
        (), "a library was loaded too late for its thread-local storage: no memory ran out"
    ),
    ("not-memory", "signal"): MessageForm((), "a worker died of an error of its own, not of memory"),
    ("mention", ""): MessageForm(
        ("unknown",), "the text has neither the size of the request nor what was free"
    ),
    ("mention", "survived"): MessageForm(
        ("informational",), "the text says that the program continues without that memory: not a failure"
    ),
    ("deepspeed-mem", "flushes"): MessageForm(
        ("informational",),
        "the allocator emptied its cache and then succeeded: slow if it is frequent, and no failure",
    ),
    ("deepspeed-mem", ""): MessageForm(("informational",), "a report of memory, no failure"),
    ("mps", "buffer"): MessageForm((), "one buffer over the device's limit for a single buffer"),
}
