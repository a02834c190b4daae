"""The forms of messages: what each proves by its words, why, what helps, what is open. One row per form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from memtriage.messages.grammar.message import Message
from memtriage.model.explanation import Label

OTHERS: Final[Label] = "other_process_or_outside_allocator"


class MessageForm(NamedTuple):
    """What is known of a form of a message.

    Attributes:
        labels: what it proves, then what it cannot rule out; empty where its figures decide.
        why: what that rests on; empty where its figures say it.
        fixes: actions of the playbook and why they help; empty where the label or the figures decide.
        question: what would settle the diagnosis, and a command; None where the label decides.
    """

    labels: tuple[Label, ...] = ()
    why: str = ""
    fixes: tuple[tuple[str, str], ...] = ()
    question: tuple[str, str] | None = None


_FIND_CALL: Final = (("watch", "the message has no sizes: find out what asked, and what was alive"),)
_TURNS: Final = (
    ("room-for-engine", "engine and trainer take turns on one device"),
    ("leave-headroom", "a smaller share is easier to get again"),
)
_LIBRARY: Final = (
    ("headroom", "the library asks the driver after the allocator has reserved most of the device"),
    ("own-context", "a second context on a device takes what the library needed"),
)
_MATH_LIBRARY: Final = (*_LIBRARY, ("free-device", "other processes may fill the device"))
_LARGER_SHM: Final = (
    ("larger-shm", "workers and NCCL pass data through /dev/shm"),
    ("fewer-workers", "if workers fill it: fewer batches are in flight at once"),
)
_CONTAINER: Final = ("which container hit which limit", "kubectl describe pod POD; docker inspect CONTAINER")
_KERNELS_LINE: Final = (
    "whether the out-of-memory killer ran: oom_kill above 0, or the kernel's line",
    "cat /sys/fs/cgroup/memory.events; dmesg -T | grep -iE 'oom-kill|killed process'",
)
_COMMITTED: Final = (
    "how much the kernel may still commit (CommitLimit minus Committed_AS)",
    "grep Commit /proc/meminfo; sysctl vm.overcommit_memory; ulimit -v",
)


def _rows(
    labels: tuple[Label, ...], reasons: Mapping[tuple[str, str], str], **rest: Any
) -> dict[tuple[str, str], MessageForm]:
    """Make the rows of forms that prove the same, for different reasons."""
    return {form: MessageForm(labels, why, **rest) for form, why in reasons.items()}


FORMS: Final[Mapping[tuple[str, str], MessageForm]] = {
    ("cuda-runtime", ""): MessageForm(
        ("unknown", "pinned_host", "does_not_fit"),
        "no sizes: the call that failed was probably not the caching allocator's (but pinned host"
        " memory, a new context, a captured graph, a library), or the error is of an earlier call",
        fixes=_FIND_CALL,
    ),
    ("cuda-runtime", "thc"): MessageForm(
        ("unknown", "does_not_fit", OTHERS),
        "a release of PyTorch up to 0.4, whose message has no sizes",
        fixes=_FIND_CALL,
    ),
    ("cuda-driver", "engine pool"): MessageForm(
        ("unknown", "does_not_fit", OTHERS),
        "an engine's own memory pool got nothing from the driver; no sizes",
        fixes=_TURNS,
    ),
    # At the first start nothing else was there; now the trainer on the same device is.
    ("cuda-driver", "engine wakes"): MessageForm(
        (OTHERS, "unknown", "does_not_fit"),
        "the engine got its memory at the start and not again when it woke up: the trainer on the"
        " same device still has its own",
        fixes=_TURNS,
    ),
    ("cuda-driver", "kernel module"): MessageForm(
        ("unknown", "host_alloc_failed", OTHERS),
        "the GPU's kernel driver got no memory, which may be the host's",
        fixes=(
            ("largest-process", "the kernel's driver takes host memory, too"),
            ("free-device", "the text does not show what uses the device"),
        ),
    ),
    ("nvml-assert", ""): MessageForm(
        ("unknown", "does_not_fit"),
        "the allocation had failed already; then composing its message failed, because NVML gave "
        "no answer (MIG slices, containers): its numbers are lost",
        fixes=(("watch", "the message lost its figures: find out what was alive at the failure"),),
    ),
    **dict.fromkeys(
        [("cublas", ""), ("cudnn", "")],
        MessageForm(
            ("library_alloc_failed", "does_not_fit"),
            "the library got no memory from the driver for its handle or workspace",
            fixes=_MATH_LIBRARY,
        ),
    ),
    **dict.fromkeys(
        [("cublas", "not initialized"), ("cudnn", "not initialized")],
        MessageForm(
            ("library_alloc_failed", "unknown", "not_memory"),
            "often the library got no memory for its handle; a driver or version mismatch gives the same "
            "message",
            fixes=_MATH_LIBRARY,
        ),
    ),
    ("nccl", ""): MessageForm(
        ("library_alloc_failed", "does_not_fit"),
        "NCCL got no memory from the driver for its buffers",
        fixes=_LIBRARY,
    ),
    ("nccl", "multicast"): MessageForm(
        ("library_alloc_failed", "not_memory"),
        "multicast reservations ran out (communicators never destroyed): the device may have free memory",
        fixes=_LIBRARY,
    ),
    ("tensorrt", ""): MessageForm(
        ("library_alloc_failed", "does_not_fit"),
        "TensorRT got no memory from the driver",
        fixes=(
            ("free-device", "the text does not show what uses the rest of the device"),
            ("less-on-device", "weights, caches and the batch are what such a program allocates"),
        ),
    ),
    **dict.fromkeys(
        [("cpu-alloc", ""), ("python-alloc", ""), ("python-alloc", "worker")],
        MessageForm(("host_alloc_failed",), "a host allocation failed: GPU memory is not involved"),
    ),
    ("python-alloc", "fork"): MessageForm(
        ("host_alloc_failed",),
        "a fork copies the process's address space, and the kernel would not commit that much: "
        "the larger the process, the more memory a fork has to be granted",
        fixes=(
            ("fork-early", "a fork has to be granted as much as the process has"),
            ("commit-limit", "the kernel commits less than it could provide"),
            ("fewer-workers", "each worker is a fork"),
        ),
        question=_COMMITTED,
    ),
    ("python-alloc", "errno"): MessageForm(
        ("host_alloc_failed",),
        "the kernel refused memory (errno 12); the text does not say for what: a fork, a mapping or an array",
        fixes=(
            ("largest-process", "other processes leave less host memory free"),
            ("commit-limit", "the kernel may commit less than it could provide"),
            ("host-limit", "if the job needs that much"),
        ),
        question=_COMMITTED,
    ),
    ("python-alloc", "commit"): MessageForm(
        ("host_alloc_failed",),
        "Windows commits no more than RAM and page file together; model files that are mapped and"
        " the CUDA libraries of each process count in full",
        fixes=(
            ("commit-limit", "RAM and page file together are the commit limit"),
            ("fewer-workers", "each process that loads the CUDA libraries commits some GiB"),
        ),
        question=(
            "how much of RAM and page file was committed already",
            'systeminfo | findstr /C:"Virtual Memory"',
        ),
    ),
    ("python-alloc", "file"): MessageForm(
        ("host_alloc_failed",),
        "the file could not be mapped: a writable mapping is committed in full, however little of it is read",
        fixes=(
            ("commit-limit", "the mapping is committed in full"),
            ("host-limit", "if the file has to be in memory"),
        ),
        question=_COMMITTED,
    ),
    ("python-alloc", "segment"): MessageForm(
        ("host_alloc_failed", "shared_memory_exhausted"),
        "each tensor shared between processes is a mapping: a small request fails when the number"
        " of mappings reaches vm.max_map_count, not because memory ran out",
        fixes=(
            ("map-count", "each shared tensor is a mapping; the default limit is 65,530 per process"),
            ("commit-limit", "the kernel may be at its commit limit"),
        ),
        question=(
            "how many mappings the process had, of how many it may have",
            "wc -l /proc/PID/maps; sysctl vm.max_map_count",
        ),
    ),
    ("kernel-oom", ""): MessageForm(("host_memory_limit",)),
    ("kernel-oom", "cgroup"): MessageForm(
        ("host_memory_limit",),
        question=(
            "what the cgroup's memory is: anonymous, shared, or files",
            "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory.stat",
        ),
    ),
    ("slurm", ""): MessageForm(
        ("host_memory_limit",),
        "the scheduler reports that the kernel's out-of-memory killer killed a process of this job",
        question=(
            "which step used how much of the memory it asked for",
            "sacct -j {job} --format=JobID,State,MaxRSS,ReqMem,ExitCode",
        ),
    ),
    # Somebody's words for it, and not the runtime's own reason.
    ("k8s", "told"): MessageForm(
        ("host_memory_limit", "killed_unproven"),
        "the text calls it killed for its memory; the container runtime's own reason is missing",
        question=_CONTAINER,
    ),
    ("ray", ""): MessageForm(
        ("host_memory_limit",),
        "Ray's memory monitor killed the worker: the node's host memory, not the GPU's",
        question=("which workers hold the node's memory", "ray memory --stats-only"),
    ),
    ("oomd", ""): MessageForm(
        ("host_memory_limit",),
        "a memory monitor (systemd-oomd, earlyoom, Dask) killed it before the kernel had to",
        question=("which processes had the memory", "journalctl -u systemd-oomd -u earlyoom"),
    ),
    ("notebook", ""): MessageForm(
        ("host_memory_limit",),
        "the notebook service reports that the host's memory was used up",
        question=("which cell's objects hold the memory", "%memit, or psutil.virtual_memory()"),
    ),
    # SIGTERM: users, schedulers and launchers send it, and so do earlyoom and an eviction by Kubernetes.
    **dict.fromkeys(
        [("launcher", "terminated"), ("dataloader-killed", "terminated")],
        MessageForm(
            ("unknown", "killed_unproven", "not_memory"),
            "SIGTERM asks a process to end: users, schedulers and launchers send it, and of the out-"
            "of-memory killers only earlyoom and an eviction by Kubernetes",
            (("prove-kill", "a signal alone does not show its sender or reason"),),
            _KERNELS_LINE,
        ),
    ),
    ("dataloader-killed", "exited"): MessageForm(
        ("killed_unproven", "host_memory_limit", "shared_memory_exhausted"),
        "a worker died; nothing in the text shows why",
        question=_KERNELS_LINE,
    ),
    ("shm", ""): MessageForm(
        ("shared_memory_exhausted",), "a write to shared memory (/dev/shm) found no room", fixes=_LARGER_SHM
    ),
    ("shm", "opening"): MessageForm(
        ("shared_memory_exhausted", "unknown"),
        "a shared-memory object could not be opened; the text has no errno",
        fixes=_LARGER_SHM,
    ),
    ("vllm", "blocks"): MessageForm(
        ("allocator_limit", "does_not_fit"),
        "weights and the profiling run take all of the share that the engine may use",
        fixes=(
            ("raise-cap", "weights and the profiling run use up the share of gpu_memory_utilization"),
            ("less-on-device", "a lower max_model_len makes the profiling run smaller"),
        ),
    ),
    ("vllm", "startup"): MessageForm((OTHERS, "allocator_limit")),
    ("vllm", "length"): MessageForm(
        ("does_not_fit", "allocator_limit"),
        "one sequence of full length does not fit into the key-value cache",
        fixes=(
            ("raise-cap", "a larger share of the device holds a longer sequence"),
            ("less-on-device", "a lower max_model_len needs less key-value cache for a sequence"),
        ),
    ),
    ("engine", "batch"): MessageForm(
        ("does_not_fit", "allocator_limit"),
        "the batch that the engine has to hold does not fit next to the weights",
        fixes=(("less-on-device", "weights, caches and the batch are what such a program allocates"),),
    ),
    **_rows(
        ("allocator_limit", "does_not_fit"),
        {
            ("engine", "share"): "weights use up the engine's share of the device: the device may have "
            "free memory",
            ("engine", "pool"): "a pool that the program reserves for itself is full: its share, not the "
            "device",
        },
        fixes=(
            ("raise-cap", "the engine's share is used up; the device may have more"),
            ("less-on-device", "a shorter context or fewer requests at once use less of the share"),
        ),
    ),
    ("not-memory", "no space"): MessageForm(
        ("not_memory", "shared_memory_exhausted"),
        "a file system is full; the text does not say which one: /dev/shm and /tmp may be in memory",
    ),
    ("mention", ""): MessageForm(
        ("unknown",),
        "the text has neither the size of the request nor what was free",
        fixes=(("read-on", "this line alone does not show whose memory ran out"),),
        question=(
            "the size of the request and what was free: the lines around this one",
            "grep -n -B5 -A5 -iE 'out of memory|alloc|oom' train.log",
        ),
    ),
    ("mps", "buffer"): MessageForm(
        ("does_not_fit", "driver_refused_though_free", "allocator_limit"),
        "one buffer over the device's limit for a single buffer",
    ),
    **_rows(
        ("not_memory",),
        {
            ("alloc-assert", ""): "two settings of the allocator conflict (expandable_segments with "
            "max_split_size_mb or IPC): no memory ran out",
            ("not-memory", "device error"): "a kernel failed on the device (an index out of range, an "
            "invalid address): no memory ran out",
            ("not-memory", "disk"): "a file could not be written: the disk or a quota is full, not memory",
            ("not-memory", "illegal access"): "a kernel read or wrote outside its tensors: no memory ran out",
            ("not-memory", "on-chip shared memory"): "a kernel needs more of the GPU's on-chip memory than"
            " a block can have: device memory is not involved",
            ("not-memory", "static TLS"): "a library was loaded too late for its thread-local storage: no "
            "memory ran out",
            ("not-memory", "signal"): "a worker died of an error of its own, not of memory",
        },
    ),
    **_rows(
        ("not_memory", "unknown"),
        {
            ("alloc-assert", "other"): "a check inside the allocator failed: a defect or conflicting "
            "settings, and no sign that memory ran out",
            ("launcher", "asked"): "SIGTERM asked the program to end: nothing shows that memory was the "
            "reason",
            # The object is gone (a clean-up race), or the process has too many files open.
            ("shm", "gone"): "the shared-memory object no longer exists (errno 2): a race at clean-up, not"
            " memory",
            ("shm", "descriptors"): "too many open files (errno 24): file descriptors ran out, not memory",
        },
    ),
    **_rows(
        ("informational",),
        {
            ("tensorrt", "tactic"): "the builder skipped a tactic that did not fit and went on with others",
            ("engine", "preempted"): "the key-value cache is full for the moment: requests wait, and "
            "nothing fails",
            ("engine", "report"): "a report of memory, no failure",
            ("engine", "weights"): "a report of memory, no failure",
            ("vllm", "breakdown"): "a report of memory, no failure",
            ("deepspeed-mem", ""): "a report of memory, no failure",
            ("python", "resource tracker"): "Python lists what was left open at its exit and cleans it up:"
            " this is not the cause of a failure",
            ("mention", "survived"): "the text says that the program continues without that memory: not a "
            "failure",
            ("allocation", "survived"): "the text says that the program continues without that memory: not"
            " a failure",
            ("deepspeed-mem", "flushes"): "the allocator emptied its cache and then succeeded: slow if it "
            "is frequent, and no failure",
        },
    ),
    **_rows(
        ("unknown", "does_not_fit"),
        {
            ("cuda-driver", ""): "the driver's or runtime's own error, without sizes",
            ("xpu-runtime", ""): "the driver's or runtime's own error, without sizes",
            ("cuda-driver", "hidden"): "this error of the driver can be a failed allocation that never "
            "says memory",
        },
        fixes=_FIND_CALL,
    ),
    **_rows(
        ("killed_unproven", "host_memory_limit"),
        {
            ("ray", "perhaps"): "a worker died; Ray lists possible reasons and knows none",
            ("launcher", "killed"): "many programs send SIGKILL; nothing in the text shows that memory was"
            " the reason",
            ("dataloader-killed", "killed"): "many programs send SIGKILL; nothing in the text shows that "
            "memory was the reason",
        },
        question=_KERNELS_LINE,
    ),
    **_rows(
        ("host_memory_limit",),
        {
            ("k8s", ""): "the container was killed at its memory limit (OOMKilled)",
            ("k8s", "eviction"): "the node ran low on memory and evicted the pod: the pod's own limit was "
            "not the reason",
        },
        question=_CONTAINER,
    ),
}


def form_of(message: Message) -> MessageForm:
    """Return what is known of a message's form."""
    return FORMS.get((message.family, message.form), MessageForm())
