"""Fixes for a diagnosed text: from the playbook, in order of cost, only those that can help this case."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from memtriage.messages.case import Case, named_processes, processes
from memtriage.messages.grammar.message import NOT_TORCH, as_printed
from memtriage.messages.judge import BASELINE, LIVE, holes_are_large
from memtriage.messages.shapes import kind_of
from memtriage.model.explanation import Fix
from memtriage.model.units import GIB, MIB
from memtriage.playbook.entries import ACTIONS


class _Choice(NamedTuple):
    """An action of the playbook for this case: why it helps here, and the bytes where these can be told.

    `named` continues the action with what it is about in this case: a process, a figure.
    """

    key: str
    why: str
    saves: int | None = None
    named: str = ""


def fixes(case: Case) -> list[Fix]:
    """Return what can help, the cheapest first. Empty where nothing ran out."""
    chosen: dict[str, Fix] = {}
    for key, why, saves, named in _choices(case):
        entry, rung = ACTIONS[key]
        action = f"{rung.action}: {named}" if named else rung.action
        fix = Fix(playbook=entry.name, action=action, why=why, math=rung.maths, costs=rung.costs)
        fix.saves_bytes = saves or None
        chosen.setdefault(key, fix)
    return list(chosen.values())


def _choices(case: Case) -> Iterator[_Choice]:
    figures = case.figures
    match case.label:
        case "unknown" if case.torch:
            yield from _without_figures(case)
        case _ if known := _by_form(case):
            yield from known
        case "does_not_fit" if case.message.family != "allocation":
            yield from _does_not_fit(case)
        case "unknown" | "does_not_fit":
            yield from _other_runtime(case)
        case "fragmentation":
            if case.serving:
                yield from _ladder(case, None)
            yield from _expandable(case)
            if case.generates:
                yield from _ladder(case, None)
                return
            if not case.serving:
                yield _Choice("bucket", "changing shapes leave holes that later requests do not fit")
            if case.possible("private_pools"):
                yield _fewer_graphs(case)
            if case.possible("does_not_fit"):
                yield from _ladder(case, case.gap)
        case "other_process_or_outside_allocator":
            yield from _outside(case)
        case "allocator_limit" if case.message.family == "mps":
            yield _Choice("metal-limit", "the limit is PyTorch's own, a multiple of what Metal recommends")
            if case.possible("does_not_fit"):
                yield from _ladder(case, None) if case.generates else _activations(case, "")
        case "allocator_limit":
            room = figures.total - figures.allowed if figures.total and figures.allowed else None
            more = ", the device has more" if room else ""
            yield _Choice("raise-cap", f"the cap is {as_printed(figures.allowed or 0)}{more}", room)
        case "driver_refused_though_free":
            if case.possible("allocator_limit"):
                yield _Choice("raise-cap", "the process is also close to its cap")
            yield _Choice("check-driver", "the driver refused although the device has free memory")
            if case.message.family in NOT_TORCH:
                yield _Choice("less-on-device", "smaller buffers may succeed")
            else:
                piece = f"one piece of {as_printed(figures.requested or 0)} was refused"
                yield _Choice("split-request", f"{piece}; smaller ones may succeed")
                if case.possible("fragmentation"):
                    yield from _expandable(case)
        case "system_memory_fallback":
            total, live = figures.total, figures.allocated
            if (figures.requested or 0) >= LIVE * (total or 1):
                yield from _one_tensor(case)
            yield _Choice(
                "no-fallback", "the card is over-full, and the driver hides it by using the host's memory"
            )
            spilled = None
            if figures.requested is not None and live is not None and total is not None:
                spilled = live + figures.requested - total
            yield from _ladder(case, spilled)
        case "absurd_request":
            yield _Choice("find-size", "the size is garbage; no memory setting can help")
        case "private_pools":
            yield _fewer_graphs(case)
        case "host_memory_limit":
            yield from _host_full(case)
        case "host_alloc_failed":
            yield from _host_refused(case)
        case "killed_unproven":
            yield _Choice("prove-kill", "a signal alone does not show its sender or reason")
            if "builds" in case.traits:
                yield _Choice("build-jobs", "if memory was the reason: compilers that run at once use it")


def _without_figures(case: Case) -> Iterator[_Choice]:
    """Yield what helps a program of this kind, whatever failed."""
    if "unified memory" in case.traits:
        if case.message.family == "cuda-driver":
            yield _Choice("no-expandable", "its calls of the driver fail on some devices, whatever is free")
        yield _Choice("page-cache", "device and host share one memory: files that were read count, too")
    if known := _by_form(case):
        yield from known
    elif case.trains_nothing:
        yield from _ladder(case, None)
    else:
        yield _Choice("watch", "the text has too few figures to find the cause")


def _by_form(case: Case) -> list[_Choice]:
    watched = case.torch and not case.trains_nothing
    return [_Choice(key, why) for key, why in case.form.fixes if watched or key != "watch"]


# The device is full


def _other_runtime(case: Case) -> Iterator[_Choice]:
    """For a runtime that is not PyTorch, whose settings are its own."""
    if case.message.device == "host":
        yield _Choice("largest-process", "other processes leave less host memory free")
        yield _Choice("less-on-host", "weights and caches are what such a program allocates")
        return
    if case.label != "does_not_fit" or case.possible("unknown"):
        yield _Choice("free-device", "the text does not show what uses the rest of the device")
    yield _Choice("less-on-device", "weights, caches and the batch are what such a program allocates")


def _does_not_fit(case: Case) -> Iterator[_Choice]:
    """Yield what cannot be ruled out and costs nothing, then a smaller step."""
    figures = case.figures
    if case.possible("unknown"):
        yield _Choice("watch", "figures are cut off: confirm the cause first")
    if case.possible("driver_refused_though_free") and case.message.family != "mps":
        yield _Choice("check-driver", "the free memory barely covers the request")
    ways: list[_Choice] = []
    _, others = processes(case.message)
    if case.possible("fragmentation") and holes_are_large(figures):
        ways += _fewer_holes(case)
    missing, held = max(1, (figures.requested or 0) - (figures.free or 0)), sum(use for _, use in others)
    if case.possible("other_process_or_outside_allocator"):
        ways += _outside(case)
    elif held >= missing:
        reason = f"other processes hold {as_printed(held)}, and {as_printed(missing)} is missing"
        ways.append(_Choice("free-device", reason, held, named_processes(others)))
    if case.possible("private_pools"):
        ways.append(_fewer_graphs(case))
    yield from sorted(ways, key=lambda way: -(way.saves or 0))
    if case.message.form == "buffer" or (figures.requested or 0) > (figures.total or figures.requested or 0):
        yield from _one_tensor(case)
    yield from _ladder(case, case.gap)
    if case.possible("fragmentation"):
        yield from _fewer_holes(case)


def _fewer_graphs(case: Case) -> _Choice:
    pools = case.figures.private_pools
    reason = f"{as_printed(pools or 0)} is free in pools of CUDA graphs: more than needed"
    return _Choice("fewer-graphs", reason, pools)


def _one_tensor(case: Case) -> Iterator[_Choice]:
    """The one request is too large by itself: what makes that tensor smaller comes first."""
    if case.product is None:
        reason = "one tensor takes the whole device: see which sizes it is the product of (`--shapes`)"
        yield _Choice("find-size", reason)


def _ladder(case: Case, gap: int | None) -> Iterator[_Choice]:
    """Yield the rungs of M4 that can lower this peak; of an engine that serves, its own settings."""
    total = case.figures.total
    if case.generates:
        yield _Choice("in-pieces", "the largest single request decides: there are no gradients to save")
        yield _Choice("fewer-weights", "weights are most of what a program that only runs a model keeps")
        return
    if case.serving:
        if case.weights is not None and total is not None and case.weights >= LIVE * total:
            why = f"the weights alone take {as_printed(case.weights)} of {as_printed(total)}"
            yield _Choice("fewer-weights", why)
            return
        yield _Choice("leave-headroom", "the share is of weights and cache; activations and graphs need more")
        yield _Choice("smaller-graphs", "each captured batch size keeps buffers of its own")
        yield _Choice("less-on-device", "weights, cache and the requests at once are what an engine asks for")
        return
    needs = "" if gap is None else f"; free {as_printed(gap)}"
    if _second_copy(case):
        yield from _weights(case, "the request is as large as all that is allocated: a copy of the weights")
        return
    product, asked = case.product, case.figures.requested
    if product is not None and product.is_logits:
        yield _Choice(
            "fused-loss", "the request is the logits: a fused loss never holds all of them at once", asked
        )
    if product is not None and product.is_scores:
        yield _Choice("attention", "the request is attention scores, which need not be materialized", asked)
    if case.phase == "setup":
        yield from _weights(case, f"weights alone do not fit{needs}")
        return
    if case.phase == "evaluation":
        yield _Choice("no-grad", "it is an evaluation: with gradients on, every activation is kept")
        yield _Choice("keep-reduced", "outputs kept on the device from batch to batch add up")
    if case.phase == "optimizer":
        yield _Choice("fused-step", f"the peak is the optimizer's step, not activations{needs}")
    else:
        yield from _activations(case, needs)
    if case.phase != "evaluation":
        yield from _weights(case, "weights, gradients and optimizer state do not shrink with the batch")


def _second_copy(case: Case) -> bool:
    """Whether one request is as large as everything that lives: gradients or states in one buffer."""
    asked, live = case.figures.requested, case.figures.allocated
    return asked is not None and live is not None and asked >= GIB and abs(asked - live) <= asked // 50


def _activations(case: Case, needs: str) -> Iterator[_Choice]:
    sizes = {kind_of(name): count for name, count in case.shapes.items()}
    product, asked = case.product, case.figures.requested
    batch = sizes.get("batch", 1 if "batch of one" in case.traits else 0)
    # A request that has the batch in it is halved with it; how much else goes is not in the text.
    in_request = product is not None and any(kind_of(name) in ("batch", "tokens") for name in product.names)
    halved = asked // 2 if asked is not None and in_request else None
    if batch != 1:
        yield _Choice("micro-batch", f"activations grow with the micro-batch{needs}", halved)
    yield _Choice("fused-loss", "with a large vocabulary the loss is often the peak: 12 to 14 B per logit")
    if product is None or product.itemsize > 2:
        yield _Choice("bf16", "halves activations that are fp32")
    parts = [sizes.get(name) or 0 for name in ("sequence", "batch", "hidden")]
    # `L s b h 32` at 16 bits (M7), less one layer; without scores, which efficient attention spares.
    saves = 32 * max(0, sizes.get("layers", 0) - 1) * math.prod(parts)
    yield _Choice("checkpointing", "keeps only the inputs of blocks and recomputes the rest", saves)
    yield _Choice("attention", "keeps no attention scores in memory, if attention still materializes them")
    yield _Choice("shorter", "activations grow with the length; this changes the task")


def _weights(case: Case, why: str) -> Iterator[_Choice]:
    params, ranks = case.shapes.get("params"), case.shapes.get("ranks")
    if case.phase != "setup" and not _second_copy(case):
        saved = 6 * params if params else None
        yield _Choice("optimizer-8bit", f"{why}: 2 B of state per parameter instead of 8", saved)
    if ranks != 1:
        sharded = 8 * params * (ranks - 1) // ranks if params and ranks else None
        yield _Choice("shard", f"{why}; each of several GPUs holds a share", sharded)
    yield _Choice("offload", f"{why}; the host can hold them, but is slower", 8 * params if params else None)
    yield _Choice("adapters", "finetuning only: gradients and states exist for adapters only")


# The device is not full


def _expandable(case: Case) -> Iterator[_Choice]:
    if case.message.family not in ("cuda-v1", "cuda-v2", "hip-v2") or case.expandable:
        return
    if "no expandable segments" in case.traits:
        return
    holes = case.figures.reserved_unallocated
    reason = f"{as_printed(holes)} is free in holes, " if holes else ""
    yield _Choice("expandable", f"{reason}requested {as_printed(case.figures.requested or 0)}", holes)


def _fewer_holes(case: Case) -> Iterator[_Choice]:
    yield from _expandable(case)
    if case.expandable:
        yield _Choice("bucket", "holes come from changing shapes; expandable segments are on already")


def _outside(case: Case) -> Iterator[_Choice]:
    figures = case.figures
    if case.message.family == "mps":
        other = case.message.number("other") or 0
        yield _Choice("free-device", f"{as_printed(other)} of this process's Metal memory is not PyTorch's")
        yield _Choice("metal-limit", "the limit includes them")
        return
    if case.message.family == "vllm":
        yield _Choice("free-device", "the engine found the device partly in use")
        free, total = figures.free, figures.total
        at_most = f"at most {math.floor(100 * free / total) / 100:.2f}" if free and total else ""
        yield _Choice("lower-share", "a share that fits next to the others", named=at_most)
        return
    if "unified memory" in case.traits:
        yield _Choice(
            "page-cache", "device and host share one memory: programs and cached files take from it"
        )
        return
    own, others = processes(case.message)
    reserved, outside = figures.reserved or 0, figures.outside
    if outside is not None and own is not None and own - reserved > outside / 2:
        yield _Choice(
            "watch",
            f"this process itself has {as_printed(own - reserved)} outside its allocator (libraries, NCCL, "
            "graphs): the report shows at which step they appear",
        )
    else:
        reason = (
            f"{as_printed(outside)} is outside this process's allocator" if outside else "most is outside"
        )
        spare = None if outside is None else max(0, outside - BASELINE)
        held = sum(use for _, use in others)
        yield _Choice("free-device", reason, held or spare, named_processes(others))
    if figures.device is None or figures.device == "cuda:0":
        yield _Choice("own-context", "on GPU 0 these bytes may be contexts of this job's own ranks")
    if case.possible("fragmentation"):
        yield from _expandable(case)


# The host


_ONE_TENSOR = 64 * MIB
"""Bytes from which on a refused request is large enough for its own size to be the reason."""


def _host_full(case: Case) -> Iterator[_Choice]:
    message = case.message
    victim = str(message.facts.get("comm", "python"))
    used, task = message.number("node_used"), message.number("task_used")
    reason = "the killed process may not be the largest one"
    if used is not None and task is not None:
        reason = f"the killed task had {as_printed(task)} of the {as_printed(used)} in use"
    if "builds" in case.traits:
        yield _Choice("build-jobs", "compilers that run at once take some GiB each")
    elif message.family in ("ray", "oomd") or not victim.startswith(("python", "pt_")):
        yield _Choice("largest-process", reason)
        yield _Choice("lazy-data", "a copy of the data in each process is a common cause")
    else:
        if message.family != "notebook":
            yield _Choice("fewer-workers", "each worker holds its own copies and prefetched batches")
        yield _Choice("lazy-data", "a copy of the data in each rank and worker is a common cause")
    yield _Choice("host-limit", "if the job needs that much")


def _host_refused(case: Case) -> Iterator[_Choice]:
    asked = case.message.number("requested")
    if case.message.form == "worker":
        yield _Choice("fewer-workers", "the failed allocation was in a worker")
    if case.message.family in NOT_TORCH:
        yield from _other_runtime(case)
    elif asked is None or asked >= _ONE_TENSOR:
        reason = f"one request of {as_printed(asked)}" if asked else "the request"
        yield _Choice("chunk-host", f"{reason} was more than the host could provide", asked)
    else:
        yield _Choice("largest-process", f"a request of {as_printed(asked)} did not fill the host alone")
    if case.message.family not in NOT_TORCH:
        yield _Choice("lazy-data", "the process's other data leaves less memory free")
    yield _Choice("host-limit", "if the job needs that much")
