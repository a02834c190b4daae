"""What a diagnosis rests on, in sentences and sums, and the one fact that would settle what is open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from memtriage.messages.case import Case, named_processes, processes
from memtriage.messages.grammar.message import (
    ALLOCATORS,
    NOT_TORCH,
    SUM_ERROR,
    Message,
    OomFields,
    as_printed,
)
from memtriage.messages.shapes import as_logits
from memtriage.model.explanation import Label, Settle
from memtriage.model.units import MIB

_ROUNDED: Final = {2 * MIB: "any tensor of up to 1 MiB", 20 * MIB: "any tensor of 1 to 10 MiB"}
_CONTEXT: Final = "one process's context and libraries take about 0.75 GiB (measured on an H200)"
_PHASES: Final = {
    "forward": "the traceback is of a forward pass",
    "backward": "the traceback is of a backward pass: gradients come on top of every saved activation",
    "optimizer": "the traceback is of an optimizer's step: activations are gone by then, its state is not",
    "evaluation": "the traceback is of an evaluation",
    "setup": "the traceback is of loading or moving weights, before any training",
}


def evidence(case: Case) -> list[str]:
    """Return the sentences for a case: what the user's sizes make, the sums, what decides, the rest."""
    by_figures = case.message.family in ALLOCATORS or case.label == "absurd_request"
    cut = bool(case.message.missing)
    deciding = proof(case.label, case.figures, cut=cut) if by_figures else _deciding_text(case)
    return [*_sums(case), *deciding, *_processes(case), *_circumstances(case)]


def _sums(case: Case) -> Iterator[str]:
    asked = case.figures.requested
    if case.product is not None:
        meaning = f": {case.product.meaning}" if case.product.meaning else ""
        yield f"{case.product.text}{meaning}"
    elif asked is not None and (guess := as_logits(asked, case.shapes)) is not None:
        yield guess
    allocated, other, limit = map(case.message.number, ("allocated", "other", "max_allowed"))
    if allocated is not None and other is not None and asked is not None:  # Metal
        over = f", over the limit of {as_printed(limit)}" if limit is not None else ""
        yield (
            f"{as_printed(allocated)} allocated + {as_printed(other)} other Metal memory of this process"
            f" + {as_printed(asked)} requested = {as_printed(allocated + other + asked)}{over}"
        )
    elif case.message.family == "cpu-alloc" and asked is not None:
        yield f"requested {as_printed(asked)} (exactly)"
    else:
        of_device = case.message.family in ALLOCATORS
        yield from sums(case.label, case.figures if of_device else replace(case.figures, total=None))


def sums(label: Label, figures: OomFields) -> Iterator[str]:
    """Yield what was requested and free, and the parts of the device."""
    asked, free, total = figures.requested, figures.free, figures.total
    if asked is not None and free is not None and label != "absurd_request":
        gap = asked - free
        verdict = f"{as_printed(gap)} short" if gap > 0 else "the free memory covers it"
        if label == "driver_refused_though_free":
            verdict = "the driver refused though memory was free"
        yield f"requested {as_printed(asked)}; {as_printed(free)} free: {verdict}"
    elif asked is not None:
        yield f"requested {as_printed(asked)}"
    outside, holes = figures.outside, figures.reserved_unallocated
    names = "allocated", "in holes (reserved but unallocated)", "free", "outside this process's allocator"
    apart = outside if outside is not None and outside >= SUM_ERROR else None
    known = _known(zip((figures.allocated, holes, free, apart), names, strict=True))
    if total is not None and outside is not None:
        yield f"{' + '.join(known)} = {as_printed(total)}, the device"
    elif total is not None and known:
        yield f"the device has {as_printed(total)}: {', '.join(known)}"


def _processes(case: Case) -> Iterator[str]:
    if case.message.family not in ALLOCATORS:
        return
    own, others = processes(case.message)
    if others:
        held = as_printed(sum(use for _, use in others))
        yield f"other processes have {held} on the device: {named_processes(others)}"
    if own is not None and (reserved := case.figures.reserved) is not None and own - reserved >= SUM_ERROR:
        yield (
            f"this process has {as_printed(own)} on the device, {as_printed(own - reserved)} of it not the "
            "allocator's (context, libraries, NCCL)"
        )


def proof(label: Label, figures: OomFields, *, cut: bool = False) -> Iterator[str]:
    """Yield the comparison of figures that decides a label; `cut` if the text ends inside of them."""
    asked, total, free = figures.requested or 0, figures.total or 1, figures.free or 0
    allocated, holes = figures.allocated or 0, figures.reserved_unallocated or 0
    reserved = figures.reserved if figures.reserved is not None else allocated
    if label == "absurd_request":
        yield "no machine has that much: a length or an index became this size"
    elif label == "system_memory_fallback":
        what = "allocated" if allocated > total else "reserved"
        size = allocated if allocated > total else allocated + holes
        yield (
            f"{as_printed(size)} {what} on a device of {as_printed(total)}: "
            f"{as_printed(size - total)} have spilled to system memory; the free figure means nothing"
        )
    elif label == "does_not_fit" and asked > total:
        yield "the request alone exceeds the device: no state of the device could hold it"
    elif label == "does_not_fit" and cut:
        yield "the text ends inside of the allocated bytes, which fill the device if they are GiB"
    elif label == "does_not_fit" and figures.free is None:
        yield (
            f"{as_printed(allocated)} allocated + {as_printed(asked)} requested exceed the device by "
            f"{as_printed(allocated + asked - total)}"
        )
    elif label == "does_not_fit" and asked > free + holes:
        yield (
            f"{as_printed(free)} free + {as_printed(holes)} in holes = {as_printed(free + holes)}: "
            f"even with every hole closed the request exceeds it by {as_printed(asked - free - holes)}"
        )
    elif label == "does_not_fit":
        left = free + holes - asked
        yield (
            f"live bytes fill {allocated / total:.0%} of the device; closing every hole would leave "
            f"{as_printed(left)}, {left / total:.1%} of it"
        )
    elif label == "fragmentation":
        yield (
            f"{as_printed(holes)} is free in holes of segments that are partly in use, none of them large "
            f"enough for {as_printed(asked)}: wholly free segments had been released before the message"
        )
    elif label == "other_process_or_outside_allocator":
        outside = figures.outside or 0
        share = f"{outside / total:.0%} of the device"
        yield f"{as_printed(outside)} outside the allocator are {share}; {_CONTEXT}"
    elif label == "allocator_limit":
        yield (
            f"{as_printed(reserved)} reserved + {as_printed(asked)} requested exceed the cap of "
            f"{as_printed(figures.allowed or 0)} on this process; the device has {as_printed(total)}"
        )
    elif label == "driver_refused_though_free" and figures.free is None:
        yield (
            f"{as_printed(reserved)} reserved + {as_printed(asked)} requested is "
            f"{(reserved + asked) / total:.0%} of the device; the message does not say what was free"
        )
    elif label == "private_pools":
        yield (
            f"{as_printed(figures.private_pools or 0)} is free but parked in private pools (CUDA graphs), "
            f"which no other pool may use; {as_printed(allocated - (figures.private_pools or 0))} is live"
        )
    elif label == "unknown":
        yield "the figures in the text do not show the cause"


def _deciding_text(case: Case) -> Iterator[str]:
    message = case.message
    facts = message.facts
    if message.family == "kernel-oom":
        yield from _kernel(message)
    elif case.form.why:
        yield case.form.why
    if message.family == "vllm":
        yield from _engine(message)
    if message.family == "allocation" and message.form != "survived":
        yield from _allocation(message)
    if (rss := message.number("rss")) is not None:
        yield f"{message.facts.get('comm', 'the process')} had {as_printed(rss)} in memory"
    if (used := message.number("node_used")) is not None:
        total, share = message.number("node_total"), ""
        if "fraction" in facts:
            share = f" ({float(facts['fraction']):.0%}, allowed {float(facts['threshold']):.0%})"
        yield f"the node used {as_printed(used)}" + (f" of {as_printed(total)}{share}" if total else "")
        if (task := message.number("task_used")) is not None:
            yield f"the killed task had {as_printed(task)}"
    if "MA" in message.fields:
        words = ("allocated", "at its peak", "reserved", "reserved at its peak")
        yield ", ".join(_known(zip(map(message.number, message.fields), words, strict=True)))
    if message.form == "breakdown":
        yield " + ".join(_known((message.number(name), name.replace("_", " ")) for name in message.fields))


def _known(sizes: Iterable[tuple[int | None, str]]) -> list[str]:
    return [f"{as_printed(nbytes)} {words}" for nbytes, words in sizes if nbytes is not None]


def _allocation(message: Message) -> Iterator[str]:
    size = message.number
    if size("requested") is None and (shape := size("shape_bytes")) is not None:
        yield f"requested {as_printed(shape)}: the product of the shape and its type"
    used, total, cap, largest = map(size, ("used", "total", "allowed", "max_buffer"))
    asked = size("requested") or 0
    if used is not None and total is not None:
        over = f": {as_printed(used - total)} too much" if used > total else ""
        yield f"needs {as_printed(used)} of {as_printed(total)}{over}"
    elif total is not None and asked > total:
        yield f"the request alone exceeds the total of {as_printed(total)}"
    if largest is not None:
        yield f"one buffer may have {as_printed(largest)} at most on this device, whatever is free"
    elif message.form == "single":
        yield "one buffer is over the device's limit for a single buffer, whatever is free"
    if (live := size("allocated")) is not None:
        limit = "" if cap is None else f", with a limit of {as_printed(cap)}"
        yield f"{as_printed(live)} allocated before{limit}"
    if message.device == "host":
        yield "the request is for host memory: GPU memory is not involved"
    elif size("free") is None and total is None and cap is None and message.form == "failed":
        yield "the text shows neither what was free nor what used the rest"


def _kernel(message: Message) -> Iterator[str]:
    victim = message.facts.get("comm", "a process")
    pid = f" (pid {message.facts['pid']})" if "pid" in message.facts else ""
    where = "a cgroup was at its limit" if message.form == "cgroup" else "the whole machine was out of memory"
    if message.form == "" and "constraint" not in message.facts:
        where = "memory ran out"
    yield f"the kernel's out-of-memory killer killed {victim}{pid}: {where}"
    anonymous = message.number("anon_rss")
    if anonymous is not None:
        others = (
            (message.number("file_rss") or None, "of files"),
            (message.number("shmem_rss") or None, "shared"),
        )
        yield f"{victim} had {', '.join(_known([(anonymous, 'of its own'), *others]))} in memory"


def _engine(message: Message) -> Iterator[str]:
    facts, sizes = message.facts, message.number
    free, total, desired = sizes("free"), sizes("total"), sizes("desired")
    if free is not None and total is not None and desired is not None:
        yield (
            f"{as_printed(free)} free of {as_printed(total)} before the engine started; it wants "
            f"{as_printed(desired)}: {as_printed(total - free)} is in use by other processes, or by "
            "this process outside the engine"
        )
    needed, available = sizes("kv_needed"), sizes("kv_available")
    if needed is not None and available is not None:
        short = as_printed(needed - available)
        yield f"the cache needs {as_printed(needed)} and has {as_printed(available)}: {short} short"
    if "max_seq_len" in facts:
        yield f"one sequence may have {facts['max_seq_len']:,} tokens, the cache holds {facts['kv_tokens']:,}"


def _circumstances(case: Case) -> Iterator[str]:
    figures = case.figures
    asked = figures.requested
    if case.message.family.startswith(("cuda-v", "hip")) and (small := _ROUNDED.get(asked or 0)):
        yield f"{as_printed(asked or 0)} is what the allocator asks for {small}: it does not show the shape"
    if case.phase is not None:
        yield _PHASES[case.phase]
    if case.label == "does_not_fit" and case.gap is not None and (asked or 0) <= (figures.total or 0):
        yield f"to fit with 5 % of the device to spare, free {as_printed(case.gap)}"
    if case.message.missing:
        names = ", ".join(name.replace("_", " ") for name in case.message.missing)
        yield f"not in the text: {names}"


# What is open

_NVIDIA_USERS: Final = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv"
_USERS: Final[Mapping[str, str]] = {
    "hip": "rocm-smi --showpids",
    "xpu": "xpu-smi ps",
    "npu": "npu-smi info",
    "mps": "footprint -p PID",
    "tpu": "tpu-info",
    "host": "ps aux --sort=-rss | head",
}
"""What lists the users of a device, by its message's family or the part of its name before the number."""
_NAME_THE_CALL: Final = "CUDA_LAUNCH_BLOCKING=1 TORCH_SHOW_CPP_STACKTRACES=1 python train.py"
_WATCH: Final = "memtriage run train.py"
_FULL: Final = ("does_not_fit", "fragmentation", "private_pools")
_ALIVE: Final = ("the largest free block at the failure, and the owners of the live bytes around it", _WATCH)
_FRESH: Final = "python -c \"import torch; torch.empty({asked}, dtype=torch.uint8, device='{device}')\""
_QUESTIONS: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys(_FULL, _ALIVE),
    "other_process_or_outside_allocator": ("which other processes use the device", "{users}"),
    "allocator_limit": (
        "who set the cap",
        "grep -rniE 'mem(ory)?[_-](fraction|limit)|gpu_memory_utilization' .",
    ),
    "driver_refused_though_free": ("whether the driver grants the same request to a fresh process", _FRESH),
    "system_memory_fallback": (
        "how full the card is while the program runs",
        "nvidia-smi --query-gpu=memory.used,memory.total --format=csv -l 1",
    ),
    "absurd_request": ("the line that asked for this size", _NAME_THE_CALL),
    "library_alloc_failed": (
        "how much of the device was free when the library asked, and what used the rest",
        "{users}",
    ),
    "unknown": ("what was alive on the device at the failure", _WATCH),
    "host_memory_limit": ("which processes had the memory: the table above the kernel's line", "dmesg -T"),
    "host_alloc_failed": (
        "how much the host, its cgroup and the process's own limit allow",
        "free -b; cat /sys/fs/cgroup/memory.max; ulimit -v",
    ),
    "shared_memory_exhausted": ("the size of /dev/shm and what is in it", "df -h /dev/shm"),
}
"""What would settle a diagnosis, and the command that shows it."""
_ELSEWHERE: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys(_FULL, ("how much was free before the program began", "{users}")),
    "unknown": ("how much of the device was free, and what used the rest", "{users}"),
}
"""The same where there is no script to watch, or PyTorch has no part in it."""


def settle(case: Case) -> Settle | None:
    """Return the further fact that would settle a diagnosis; None where nothing is open."""
    message, question = case.message, _question(case)
    if question is None:
        return None
    fact, command = question
    kind = (message.device or "").partition(":")[0]
    backend = message.family.partition("-")[0]  # ROCm's devices are called cuda, too
    told = {
        "users": _USERS.get(backend, _USERS.get(kind, _NVIDIA_USERS)),
        "job": message.facts.get("job", "JOBID"),
        "asked": case.figures.requested or 0,
        "device": case.figures.device or "cuda:0",
    }
    return Settle(fact=fact, command=command.format(**told))


def _question(case: Case) -> tuple[str, str] | None:
    message = case.message
    elsewhere = not case.torch or case.trains_nothing
    match case.label:
        case _ if case.form.question is not None:
            return case.form.question
        case label if label in _FULL and len(case.labels) == 1:
            return None
        case "does_not_fit" if message.form == "single":
            return (
                "which buffer it is, and the device's limit for one",
                "grep -n -B5 -iE 'buffer|max.*alloc' train.log",
            )
        case "other_process_or_outside_allocator" if message.family == "mps":
            return "which library of this process holds Metal memory", "{users}"
        case "allocator_limit" if message.family == "mps":
            return "whether the limit was set", "echo $PYTORCH_MPS_HIGH_WATERMARK_RATIO"
        case "driver_refused_though_free" if message.family in NOT_TORCH:
            return "whether a limit for one allocation refused", "{users}"
        case "absurd_request" if message.family in NOT_TORCH or message.device in ("host", "cpu"):
            return (
                "the line that asked for this size, and the shapes of its inputs",
                "python -X faulthandler train.py",
            )
        case "unknown" if not elsewhere and message.family in ("cuda-runtime", "cuda-driver"):
            return "which call failed", _NAME_THE_CALL
        case label if elsewhere and label in _ELSEWHERE:
            return _ELSEWHERE[label]
        case label:
            return _QUESTIONS.get(label)


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
    older = "max_split_size_mb is the older advice: expandable_segments:True avoids holes better"
    return older if hint == "max_split_size_mb" else None
