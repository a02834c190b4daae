"""What a diagnosis rests on, in sentences and sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from memtriage.messages.case import Case, named_processes, other_processes, own_process
from memtriage.messages.grammar.message import ALLOCATORS, SUM_ERROR, Message, OomFields
from memtriage.messages.grammar.sizes import as_printed
from memtriage.messages.judge import POLICY
from memtriage.messages.shapes import as_logits
from memtriage.model.explanation import Label
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
    return [*_shaped(case), *_sums(case), *_deciding(case), *_processes(case), *_circumstances(case)]


def _shaped(case: Case) -> Iterator[str]:
    asked = case.figures.requested
    if case.product is not None:
        meaning = f": {case.product.meaning}" if case.product.meaning else ""
        yield f"{case.product.text}{meaning}"
    elif asked is not None and (guess := as_logits(asked, case.shapes)) is not None:
        yield guess


def _sums(case: Case) -> Iterator[str]:
    asked = case.figures.requested
    if case.message.family == "mps":
        yield from _metal(case.message)
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
    parts = [
        (figures.allocated, "allocated"),
        (figures.reserved_unallocated, "in holes (reserved but unallocated)"),
        (free, "free"),
    ]
    known = _known(parts)
    if total is None or not known:
        return
    outside = figures.outside
    if outside is not None:
        if outside >= SUM_ERROR:
            known.append(f"{as_printed(outside)} outside this process's allocator")
        yield f"{' + '.join(known)} = {as_printed(total)}, the device"
    else:
        yield f"the device has {as_printed(total)}: {', '.join(known)}"


def _metal(message: Message) -> Iterator[str]:
    asked = message.number("requested")
    allocated, other, limit = (message.number(name) for name in ("allocated", "other", "max_allowed"))
    if allocated is not None and other is not None and asked is not None:
        sentence = (
            f"{as_printed(allocated)} allocated + {as_printed(other)} other Metal memory of this process"
        )
        sentence += f" + {as_printed(asked)} requested = {as_printed(allocated + other + asked)}"
        yield sentence + (f", over the limit of {as_printed(limit)}" if limit is not None else "")
    elif asked is not None:
        yield f"requested {as_printed(asked)}"


def _processes(case: Case) -> Iterator[str]:
    if case.message.family not in ALLOCATORS:
        return
    own, others = own_process(case.message), other_processes(case.message)
    if others:
        held = as_printed(sum(use for _, use in others))
        yield f"other processes have {held} on the device: {named_processes(others)}"
    if own is not None and (reserved := case.figures.reserved) is not None and own - reserved >= SUM_ERROR:
        yield (
            f"this process has {as_printed(own)} on the device, {as_printed(own - reserved)} of it not the "
            "allocator's (context, libraries, NCCL)"
        )


def _deciding(case: Case) -> Iterator[str]:
    """Yield the comparison or the words that decide the label."""
    if case.message.family in ALLOCATORS:
        yield from proof(case.label, case.figures, cut=bool(case.message.missing))
    elif case.label == "absurd_request":
        yield "no machine has that much: a length or an index became this size"
    else:
        yield from _deciding_text(case)


def proof(label: Label, figures: OomFields, *, cut: bool = False) -> Iterator[str]:
    """Yield the comparison of figures that decides a label; `cut` if the text ends inside of them."""
    asked, total, free = figures.requested or 0, figures.total or 0, figures.free or 0
    allocated, holes = figures.allocated or 0, figures.reserved_unallocated or 0
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
        reserved = figures.reserved if figures.reserved is not None else allocated
        yield (
            f"{as_printed(reserved)} reserved + {as_printed(asked)} requested exceed the cap of "
            f"{as_printed(figures.allowed or 0)} on this process; the device has {as_printed(total)}"
        )
    elif label == "driver_refused_though_free" and figures.free is None:
        reserved = figures.reserved if figures.reserved is not None else allocated
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
    if message.family == "ray" and (used := message.number("node_used")) is not None:
        total = message.number("node_total")
        share = (
            f" ({float(facts['fraction']):.0%}, allowed {float(facts['threshold']):.0%})"
            if "fraction" in facts
            else ""
        )
        yield f"the node used {as_printed(used)}" + (f" of {as_printed(total)}{share}" if total else "")
        if (task := message.number("task_used")) is not None:
            yield f"the killed task had {as_printed(task)}"
    if "MA" in message.fields:
        names = {
            "MA": "allocated",
            "Max_MA": "at its peak",
            "CA": "reserved",
            "Max_CA": "reserved at its peak",
        }
        yield ", ".join(_known((message.number(name), words) for name, words in names.items()))
    if message.form == "breakdown":
        yield " + ".join(_known((message.number(name), name.replace("_", " ")) for name in message.fields))


def _known(sizes: Iterable[tuple[int | None, str]]) -> list[str]:
    return [f"{as_printed(nbytes)} {words}" for nbytes, words in sizes if nbytes is not None]


def _allocation(message: Message) -> Iterator[str]:
    size = message.number
    shape = message.facts.get("shape_bytes")
    if size("requested") is None and isinstance(shape, int):
        yield f"requested {as_printed(shape)}: the product of the shape and its type"
    used, total, cap, largest = size("used"), size("total"), size("allowed"), size("max_buffer")
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
        parts = [f"{as_printed(anonymous)} of its own"]
        for name, words in (("file_rss", "of files"), ("shmem_rss", "shared")):
            if size := message.number(name):
                parts.append(f"{as_printed(size)} {words}")
        yield f"{victim} had {', '.join(parts)} in memory"
        if message.form == "cgroup" and (message.number("shmem_rss") or 0) > anonymous:
            yield "most of it is shared memory: /dev/shm, or pinned buffers"


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
    if case.label == "does_not_fit" and figures.total is not None and figures.free is not None:
        needed = (figures.requested or 0) - figures.free + POLICY.tight * figures.total
        if (figures.requested or 0) <= figures.total:
            yield f"to fit with 5 % of the device to spare, free {as_printed(max(0, int(needed)))}"
    if case.message.missing:
        names = ", ".join(name.replace("_", " ") for name in case.message.missing)
        yield f"not in the text: {names}"
