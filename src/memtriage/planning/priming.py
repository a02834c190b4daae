"""Find the blocks with which a program's memory packs closely."""

from __future__ import annotations

import time
from typing import Final

from memtriage.allocator.priming import Blocks, PackingTrial
from memtriage.allocator.priming_search import BRIEF, POLICY, Apart, PrimingChoice, PrimingPolicy, choose
from memtriage.allocator.requests import DEFAULT_STREAM, RequestLog, Requests
from memtriage.allocator.settings import (
    OWN_SEGMENT,
    SEGMENT_STEP,
    SMALL_LIMIT,
    AllocatorSettings,
    ConfError,
    join_conf,
    parse_conf,
    parse_version,
)
from memtriage.allocator.what_if import WhatIf, known_memory, settings_of, what_if
from memtriage.model.priming import POOLS_BY_THREAD, Priming, StatePool
from memtriage.model.recording import Recording
from memtriage.model.units import size
from memtriage.prediction.build import Build
from memtriage.prediction.gpu_kinds import MEASURED, GpuKind, machine
from memtriage.prediction.requests import requests_of
from memtriage.prediction.simulate import replay
from memtriage.prediction.trace import Trace, trace
from memtriage.prediction.watch import TracedProgram

SETTINGS: Final = ("large_segment_size_mb:512", "max_split_size_mb:1024")
"""What is tried along with blocks. Of all settings only these saved 2 % where blocks alone did not, in 2 of
34 workloads (`benchmarks/prime.py`)."""
STEPS: Final = 6
"""Steps that are traced. Blocks chosen on two made two of four workloads worse than without them."""


def plan_priming(
    build: Build | TracedProgram,
    *,
    allocator_conf: str | None = None,
    gpu: str = MEASURED,
    torch_version: str | None = None,
    world_size: int = 1,
    rank: int = 0,
    policy: PrimingPolicy = POLICY,
) -> Priming:
    """The blocks to allocate before a program, or why none would help. Allocates nothing.

    Args:
        build: a build function, or another program.
        allocator_conf: None for the settings that the environment and the program set.
        gpu, torch_version, world_size, rank: as in `memtriage.predict`.
        policy: how much is tried.

    Raises:
        BuildError: the program cannot be traced; the text says what to change.
        ValueError: another argument cannot be used.
    """
    begun = time.perf_counter()
    kind = machine(gpu)
    version = parse_version(torch_version)
    parse_conf(allocator_conf or "", version)
    traced = trace(build, kind, version, STEPS, world_size, rank, allocator_conf=allocator_conf)
    priming = priming_of_trace(traced, kind, policy)
    priming.seconds = time.perf_counter() - begun
    return priming


def priming_of_trace(traced: Trace, kind: GpuKind, policy: PrimingPolicy = POLICY) -> Priming:
    """The blocks for a traced program, or why none would help."""
    counters = replay(traced.recording, traced.settings, kind.memory, traced.steps)
    allocated = max(counter.peak_allocated for counter in counters)
    reserved = max(counter.peak_reserved for counter in counters)
    requests = requests_of(traced, kind.memory)
    large = _reserved(requests, traced.settings)
    others = reserved - large
    pools = _pools(traced)
    sizes = {number: pool.size for number, pool in pools.items()}
    apart = Apart(requests_of(traced, kind.memory, sizes), sum(sizes.values())) if pools else None
    if traced.settings.expandable_segments:
        choice = PrimingChoice()
        reason: str | None = _EXPANDABLE
    else:
        allowed = others + int(policy.least_gain * large)
        settings = other_settings(traced, kind, requests, allowed)
        choice = choose(requests, traced.settings, policy, settings, apart)
        reason = _reason(choice, kind, requests)
    taken = choice if reason is None else PrimingChoice()
    if taken.apart and apart is not None:
        counters = replay(traced.recording, traced.settings, kind.memory, traced.steps, pools=sizes)
        rest = _reserved(apart.requests, traced.settings) + apart.pools
        others_after = max(counter.peak_reserved for counter in counters) - rest
    else:
        others_after = others
    before = choice.checks[0].before if choice.checks else large
    after = taken.checks[0].after if taken.checks else before
    return Priming(
        blocks=list(taken.blocks),
        allocated=allocated,
        reserved_before=others + before,
        reserved_after=others_after + after,
        steps=max(traced.steps, policy.horizon) if requests.steps else 0,
        checks=choice.checks,
        settings=taken.settings,
        pools=list(pools.values()) if taken.apart else [],
        reserved_without_pools=others + taken.without_pools if taken.apart else 0,
        tried=choice.tried,
        reason=reason,
        allocator_conf=traced.conf,
        notes=list(traced.notes),
    )


def _reserved(requests: Requests, settings: AllocatorSettings) -> int:
    return PackingTrial(settings).run(requests.all(), ()) or 0


def _pools(traced: Trace) -> dict[int, StatePool]:
    """A pool for the states of each optimizer that makes them apart and needs a segment of its own for them,
    by number of the optimizer."""
    if traced.settings.torch_version < POOLS_BY_THREAD or traced.settings.expandable_segments:
        return {}
    sizes: dict[int, int] = {}
    for block in traced.recording.blocks:
        if block.state_of is not None and block.stream == DEFAULT_STREAM:
            rounded = traced.settings.round_size(block.size)
            if rounded > SMALL_LIMIT:
                sizes[block.state_of] = sizes.get(block.state_of, 0) + rounded
    return {
        number: StatePool(size=-(-size // SEGMENT_STEP) * SEGMENT_STEP, parameters=traced.optimizers[number])
        for number, size in sorted(sizes.items())
        if size >= OWN_SEGMENT
    }


def other_settings(
    traced: Trace, kind: GpuKind, requests: Requests, allowed: int
) -> dict[str, AllocatorSettings]:
    """Those of `SETTINGS` that this torch has, the program does not set, and nothing else pays for.

    Args:
        allowed: bytes of segments that what is not among the requests may have, such as blocks of other
            streams: where they get more, a setting is left out.
    """
    found = {}
    for text in SETTINGS:
        if text.partition(":")[0] in traced.conf:
            continue
        try:
            settings = parse_conf(join_conf(traced.conf, text), traced.settings.torch_version)
        except ConfError:  # this torch does not have it, or not along with what the program sets
            continue
        counters = replay(traced.recording, settings, kind.memory, traced.steps)
        reserved = max(counter.peak_reserved for counter in counters)
        if reserved - _reserved(requests, settings) <= allowed:
            found[text] = settings
    return found


def _reason(choice: PrimingChoice, kind: GpuKind, requests: Requests) -> str | None:
    if not any(size for _, size in requests.all()):
        return "there is no block of more than 1 MiB"
    if not choice.blocks and not choice.settings and not choice.apart:
        if choice.rejected:
            return "what helps on the predicted steps does not with other lengths, orders or workspaces"
        return _NOTHING
    if sum(choice.blocks) + kind.outside > kind.memory:  # pools come later, and can do without
        return f"the blocks take {size(sum(choice.blocks))}, more than {kind.name} has"
    return None


def priming_of_recording(recording: Recording) -> Priming:
    """The blocks for the program of a memory snapshot, or why none would help.

    Of several devices the one that reserved most counts. Peaks are those of the recording.

    Raises:
        ValueError: the snapshot has no event of any device.
    """
    begun = time.perf_counter()
    devices = [device for device in recording.devices if len(device.events)]
    if not devices:
        raise ValueError(
            "the snapshot has no events: record them with torch.cuda.memory._record_memory_history"
        )
    device = max(devices, key=lambda device: int(device.timeline.reserved.max()))
    settings = settings_of(recording.settings)
    memory = known_memory(device)

    def outcome(blocks: Blocks, log: RequestLog | None = None) -> WhatIf:
        return what_if(
            device.events, device.segments, settings, settings, memory=memory, primed=blocks, log=log
        )

    log = RequestLog(settings)
    plain = outcome((), log)
    choice = PrimingChoice()
    if not settings.expandable_segments:
        choice = choose(Requests(tuple(log.requests)), settings, BRIEF)
    primed = outcome(choice.blocks) if choice.blocks else plain
    reason = None
    if settings.expandable_segments:
        reason = _EXPANDABLE
    elif not choice.blocks:
        reason = _NOTHING
    elif plain.fits and not primed.fits:
        reason = "memory would not suffice with the blocks"
    before, after = plain.simulator, (plain if reason is not None else primed).simulator
    return Priming(
        blocks=[] if reason is not None else list(choice.blocks),
        allocated=before.peak_allocated,
        reserved_before=before.peak_reserved,
        reserved_after=after.peak_reserved,
        checks=choice.checks,
        reason=reason,
        allocator_conf=str(recording.settings.get("PYTORCH_CUDA_ALLOC_CONF") or ""),
        seconds=time.perf_counter() - begun,
        notes=["of a recording only what it holds is known: the choice was not checked with other lengths"],
    )


_EXPANDABLE: Final = "expandable segments are on, which have no fixed sizes"
_NOTHING: Final = "nothing that was tried lowers what is reserved by 0.5 %"
