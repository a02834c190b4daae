"""What is still open after a diagnosis: the one fact that would settle it, and how to get it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from memtriage.messages.case import Case
from memtriage.messages.grammar.message import NOT_TORCH, Message
from memtriage.messages.grammar.sizes import as_printed
from memtriage.model.explanation import Settle

_WATCH: Final = "memtriage run train.py"
_NAME_THE_CALL: Final = "CUDA_LAUNCH_BLOCKING=1 TORCH_SHOW_CPP_STACKTRACES=1 python train.py"
_USERS: Final[Mapping[str, str]] = {
    "hip": "rocm-smi --showpids",
    "xpu": "xpu-smi ps",
    "npu": "npu-smi info",
    "mps": "footprint -p PID",
    "tpu": "tpu-info",
    "host": "ps aux --sort=-rss | head",
}
"""What lists the users of a device, by its message's family or the part of its name before the number."""
_NVIDIA_USERS: Final = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv"


def _users(message: Message) -> str:
    kind = (message.device or "").partition(":")[0]
    backend = message.family.partition("-")[0]  # ROCm's devices are called cuda, too
    return _USERS.get(backend, _USERS.get(kind, _NVIDIA_USERS))


def settle(case: Case) -> Settle | None:
    """Return the further fact that would settle a diagnosis; None where nothing is open."""
    message = case.message
    if (known := case.form.question) is not None:
        return Settle(fact=known.fact, command=known.command.format(job=message.facts.get("job", "JOBID")))
    match case.label:
        case "does_not_fit" | "fragmentation" | "private_pools" if len(case.labels) == 1:
            return None
        case "does_not_fit" if message.form == "single":
            return Settle(
                fact="which buffer it is, and the device's limit for one",
                command="grep -n -B5 -iE 'buffer|max.*alloc' train.log",
            )
        case "does_not_fit" | "fragmentation" | "private_pools" if not case.torch or case.trains_nothing:
            return Settle(fact="how much was free before the program began", command=_users(message))
        case "does_not_fit" | "fragmentation" | "private_pools":
            return Settle(
                fact="the largest free block at the failure, and the owners of the live bytes around it",
                command=_WATCH,
            )
        case "other_process_or_outside_allocator":
            if message.family == "mps":
                return Settle(
                    fact="which library of this process holds Metal memory", command="footprint -p PID"
                )
            return Settle(fact="which other processes use the device", command=_users(message))
        case "allocator_limit" if message.family == "mps":
            return Settle(fact="whether the limit was set", command="echo $PYTORCH_MPS_HIGH_WATERMARK_RATIO")
        case "allocator_limit":
            return Settle(
                fact="who set the cap",
                command="grep -rniE 'mem(ory)?[_-](fraction|limit)|gpu_memory_utilization' .",
            )
        case "driver_refused_though_free" if message.family in NOT_TORCH:
            return Settle(fact="whether a limit for one allocation refused", command=_users(message))
        case "driver_refused_though_free":
            return _fresh_process(case)
        case "system_memory_fallback":
            return Settle(
                fact="how full the card is while the program runs",
                command="nvidia-smi --query-gpu=memory.used,memory.total --format=csv -l 1",
            )
        case "absurd_request" if message.family in NOT_TORCH or message.device in ("host", "cpu"):
            return Settle(
                fact="the line that asked for this size, and the shapes of its inputs",
                command="python -X faulthandler train.py",
            )
        case "absurd_request":
            return Settle(fact="the line that asked for this size", command=_NAME_THE_CALL)
        case "library_alloc_failed":
            return Settle(
                fact="how much of the device was free when the library asked, and what used the rest",
                command=_users(message),
            )
        case "unknown" if not case.torch or case.trains_nothing:
            return Settle(
                fact="how much of the device was free, and what used the rest", command=_users(message)
            )
        case "unknown":
            named = message.family in ("cuda-runtime", "cuda-driver")
            fact = "which call failed" if named else "what was alive on the device at the failure"
            return Settle(fact=fact, command=_NAME_THE_CALL if named else _WATCH)
        case "host_memory_limit":
            return Settle(
                fact="which processes had the memory: the table above the kernel's line", command="dmesg -T"
            )
        case "host_alloc_failed":
            return Settle(
                fact="how much the host, its cgroup and the process's own limit allow",
                command="free -b; cat /sys/fs/cgroup/memory.max; ulimit -v",
            )
        case "shared_memory_exhausted":
            return Settle(fact="the size of /dev/shm and what is in it", command="df -h /dev/shm")
        case _:
            return None


def _fresh_process(case: Case) -> Settle:
    device = case.figures.device or "cuda:0"
    asked = case.figures.requested or 0
    return Settle(
        fact="whether the driver grants the same request to a fresh process",
        command=f"python -c \"import torch; torch.empty({asked}, dtype=torch.uint8, device='{device}')\"",
    )


def stale_advice(case: Case) -> str | None:
    """Why the advice in the message itself does not help here; None where it has none, or may be right."""
    hint = case.message.facts.get("hint")
    figures = case.figures
    if hint is None:
        return None
    if hint == "empty_cache":
        return "empty_cache() cannot help: the allocator released every wholly free segment before it failed"
    if str(hint).startswith("PYTORCH_MPS"):
        if case.possible("does_not_fit"):
            return "switching Metal's limit off frees nothing: the machine may swap or freeze instead"
        return None
    if case.expandable and "expandable_segments" in str(hint):
        return "expandable segments are already on: the message always prints this advice"
    holes, asked = figures.reserved_unallocated, figures.requested
    if not case.possible("fragmentation"):
        given = ""
        if holes is not None and asked is not None:
            given = f"{as_printed(holes)} in holes, {as_printed(asked)} asked: "
        return (
            f"{given}the message always prints the advice about fragmentation; its figures do not support it"
        )
    if hint == "max_split_size_mb":
        return "max_split_size_mb is the older advice: expandable_segments:True avoids holes better"
    return None
