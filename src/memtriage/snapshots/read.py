"""Read a snapshot file: load, replay, account, judge."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, Final

import msgspec
import numpy as np

from memtriage.account.segments import segment_totals, stranded_segments
from memtriage.allocator.replay import ReplayedTrace, recorded_settings, replay
from memtriage.allocator.settings import AllocatorSettings, ConfError
from memtriage.allocator.trace_columns import StackTable, span_ends, trace_columns
from memtriage.allocator.what_if import settings_of
from memtriage.model.blocks import DEFAULT_POOL, Block, Segment
from memtriage.model.recording import (
    OOM,
    OTHER_EVENT,
    OWNERS,
    DeviceRecording,
    Events,
    Figures,
    Int64s,
    Lives,
    OomEvent,
    Peak,
    PinnedSegment,
    Recording,
    SiteRow,
    SnapshotError,
    Stack,
    Steps,
)
from memtriage.model.units import count, size
from memtriage.observe.cuda import parse_segments
from memtriage.snapshots.file import loaded
from memtriage.snapshots.leaks import FEWEST_STEPS, growing_sites
from memtriage.snapshots.owners import alive_at, index_sites, label_rows, owned_bytes, owners_of, site_series
from memtriage.snapshots.rules import judge
from memtriage.snapshots.steps import StackFacts, find_steps, settled, stack_facts
from memtriage.snapshots.stranding import FLOOR
from memtriage.snapshots.view import DeviceView, Mask

_COLUMNS: Final = ("born", "died", "gone", "address", "size", "requested", "stream", "stack")
"""Of lives, those that a replay has."""
_XPU: Final = re.compile(r"\b(?:c10|at)::xpu\b|c10/xpu/|torch/xpu/")
_MOST_STEPS: Final = 240
"""Steps looked at in a long recording, evenly spread."""
_SITES: Final = 3
_NEARLY_WHOLE: Final = 0.9
"""Part of a segment that must be stranded for a note."""


def load_snapshot(path: str | os.PathLike[str]) -> Recording:
    """Replay and judge a PyTorch memory snapshot: timelines, owners, sites, segments, findings.

    The file cannot run code: anything but plain containers, text and numbers is refused.

    Args:
        path: what `torch.cuda.memory._dump_snapshot` wrote; also compressed with gzip, xz or zstd.

    Raises:
        memtriage.SnapshotError: the file is not a snapshot, or is damaged. A ValueError.
        OSError: the file cannot be read.
    """
    file = Path(path)
    table = StackTable()
    with loaded(file) as raw:
        with _refused(file, "its segments make no sense: ", TypeError, ValueError, AttributeError, KeyError):
            # Three bytes of a file could repeat a million blocks.
            lists = [*(segment.get("blocks") for segment in raw["segments"]), *raw["device_traces"]]
            if len({id(each) for each in lists if each}) < sum(map(bool, lists)):
                raise ValueError("the same blocks or events are in several segments or devices")
            segments, block_stacks = _segments(raw["segments"], table)
            file_notes = (*_overflow(raw.get("allocator_settings")), *_pinned_host(raw, table))
        with _refused(file, "", SnapshotError):
            traces = [trace_columns(trace, table) for trace in raw["device_traces"]]
        named = _settings(raw.get("allocator_settings"))
        spans = span_ends(raw.get("external_annotations"))
        # The file does not name its kind of device.
        names = (f"{each.get('filename')} {each.get('name')}" for frames in table.frames for each in frames)
        backend = "xpu" if any(map(_XPU.search, names)) else "cuda"
        stacks, facts = table.stacks(), [stack_facts(frames) for frames in table.frames]
        # before the replay: the file's own objects are by far the largest thing in memory
        del raw
    indices = sorted({each.device for each in segments} | {i for i, trace in enumerate(traces) if len(trace)})
    with _refused(file, "its settings make no sense: ", ConfError):
        # What decides the sizes of the recorded blocks, and everything that was set, for the simulator.
        recorded, simulated = recorded_settings(named), settings_of(named)
    # Sums of damaged sizes overflow: whole ones are below 2**63 by far.
    with _refused(file, "a size is out of range: ", OverflowError):
        devices = [
            _device(
                f"{backend}:{index}",
                traces[index] if index < len(traces) else trace_columns([], table),
                [segment for segment in segments if segment.device == index],
                {address: number for (device, address), number in block_stacks.items() if device == index},
                stacks,
                facts,
                spans,
                recorded,
                simulated,
            )
            for index in indices
        ]
    return Recording(
        path=str(file),
        devices=tuple(devices),
        stacks=stacks,
        settings=named,
        notes=file_notes,
    )


@contextmanager
def _refused(file: Path, reason: str, *errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise SnapshotError(f"{file}: not a memory snapshot: {reason}{error}") from None


def _overflow(settings: object) -> Iterator[str]:
    flag = settings.get("trace_alloc_overflowed") if isinstance(settings, Mapping) else None
    if flag is True or (isinstance(flag, list) and any(flag)):
        yield (
            "the ring buffer of the recording overflowed: its oldest events are lost (a larger `max_entries` "
            "of `_record_memory_history` keeps them)"
        )


def _pinned_host(raw: Mapping[str, Any], table: StackTable) -> Iterator[str]:
    """Say what the pinned host memory of a recording is, where it was recorded (torch 2.14)."""
    blocks = raw.get("host_segments") or ()
    if not blocks:
        return
    in_use = [block for block in blocks if block.get("allocated") or block.get("active")]
    total, used = (sum(int(block["size"]) for block in some) for some in (blocks, in_use))
    sites: Counter[int] = Counter()
    for block in in_use:
        if frames := block.get("frames"):
            sites[table.number(frames)] += int(block["size"])
    stacks = table.stacks()
    most = ", ".join(f"{stacks[number].site} {size(total)}" for number, total in sites.most_common(_SITES))
    yield (
        f"pinned host memory: {size(total)} in {count(len(blocks), 'block')}, {size(used)} of it in use"
        + (f", most of it from {most}" if most else "")
    )


def _settings(raw: object) -> dict[str, Any]:
    """The settings in a file: texts, numbers and tables of these. Others are none of the allocator's."""
    if not isinstance(raw, Mapping):
        return {}
    plain = (str, int, float, NoneType)
    return {
        name: value
        for name, value in raw.items()
        if isinstance(name, str) and (isinstance(value, plain) or name == "roundup_power2_divisions")
    }


def _segments(
    raw: Sequence[Mapping[str, Any]], table: StackTable
) -> tuple[list[Segment], dict[tuple[int, int], int]]:
    """The segments, and the stack of each block that has one, by device and address."""
    bare = [
        {**segment, "blocks": [{**block, "frames": ()} for block in segment.get("blocks", ())]}
        for segment in raw
    ]
    numbers: dict[tuple[int, int], int] = {}
    for segment in raw:
        position = int(segment["address"])
        for block in segment.get("blocks", ()):
            address = int(block.get("address", position))
            position = address + int(block["size"])
            history = block.get("history")  # where torch 2.0 wrote the frames, the latest first
            latest = history[0].get("frames") if isinstance(history, list) and history else None
            if frames := block.get("frames") or latest:
                numbers[int(segment.get("device", 0)), address] = table.number(frames)
    return sorted(parse_segments(bare), key=lambda segment: (segment.device, segment.address)), numbers


def _device(
    name: str,
    trace: Events,
    segments: Sequence[Segment],
    block_stacks: Mapping[int, int],
    stacks: Sequence[Stack],
    facts: Sequence[StackFacts],
    spans: Mapping[str, Sequence[int]],
    recorded: AllocatorSettings,
    simulated: AllocatorSettings,
) -> DeviceRecording:
    replayed = replay(trace, segments, recorded, block_stacks)
    steps = find_steps(trace, facts, spans)
    owners = owners_of(trace, replayed, facts, steps.ends)
    sites = index_sites(replayed, stacks)
    view = DeviceView(
        device=name,
        trace=trace,
        replayed=replayed,
        stacks=stacks,
        facts=facts,
        sites=sites,
        owners=owners,
        steps=steps,
        segments=_with_sites(segments, replayed, stacks),
        end=_figures(segments),
        ooms=_ooms(trace, replayed),
    )
    exact_from_us = None
    if len(trace) and (replayed.exact_from or (replayed.born < 0).any()):
        exact_from_us = int(trace.time_us[min(replayed.exact_from, len(trace) - 1)])
    growing = {}
    if steps.count:
        growing = growing_sites(site_series(replayed, sites, settled(trace, steps.ends), _MOST_STEPS))
    peak, pinned = _peak(view), _pinned(view)
    pools = {DEFAULT_POOL: 0}
    pool_numbers = np.array([pools.setdefault(pool, len(pools)) for pool in replayed.pool], np.int16)
    pool_of = {
        born: pool
        for born, pool in zip(replayed.born.tolist(), replayed.pool, strict=True)
        if born >= 0 and pool != DEFAULT_POOL
    }
    return DeviceRecording(
        device=name,
        events=replace(trace, pool={**trace.pool, **pool_of}),
        lives=Lives(**{name: getattr(replayed, name) for name in _COLUMNS}, owner=owners, pool=pool_numbers),
        timeline=replayed.timeline,
        pools=tuple(pools),
        start=replayed.start,
        end=view.end,
        segments=tuple(view.segments),
        pinned=pinned,
        peak=peak,
        owners=owned_bytes(view.alive(), replayed.size, owners, sites),
        sites=_site_rows(view, peak, growing),
        steps=steps,
        ooms=tuple(view.ooms),
        exact_from_us=exact_from_us,
        notes=_notes(trace, replayed, steps) + _one_pin(pinned),
        judged=steps.count >= FEWEST_STEPS and not _contradicts(replayed),
        labels=label_rows(trace, replayed, alive_at(replayed, peak.event), view.alive()),
        findings=tuple(judge(view, growing, simulated)),
    )


def _lives_at(replayed: ReplayedTrace) -> dict[int, int]:
    """The life of each block that is there at the snapshot, by its address."""
    there = np.flatnonzero(replayed.gone < 0)
    return dict(zip(replayed.address[there].tolist(), there.tolist(), strict=True))


def _with_sites(
    segments: Sequence[Segment], replayed: ReplayedTrace, stacks: Sequence[Stack]
) -> list[Segment]:
    lives = _lives_at(replayed)

    def named(block: Block) -> Block:
        number = replayed.stack[lives[block.address]] if block.address in lives else 0
        if block.state == "free" or not number:
            return block
        return msgspec.structs.replace(block, site=stacks[number].site)

    return [
        msgspec.structs.replace(segment, blocks=tuple(map(named, segment.blocks))) for segment in segments
    ]


def _figures(segments: Sequence[Segment]) -> Figures:
    totals = segment_totals(segments)
    private_free = segment_totals(
        [segment for segment in segments if segment.pool != DEFAULT_POOL]
    ).releasable
    return Figures(
        **{**msgspec.structs.asdict(totals), "releasable": totals.releasable - private_free},
        allocated=totals.allocated,
        private_pools_free=private_free,
    )


def _ooms(trace: Events, replayed: ReplayedTrace) -> list[OomEvent]:
    return [
        OomEvent(
            event=event,
            time_us=int(trace.time_us[event]),
            requested=int(trace.size[event]),
            device_free=trace.device_free.get(event),
            stream=int(trace.stream[event]),
            stack=int(trace.stack[event]),
            allocated=int(replayed.timeline.allocated[event]),
            reserved=int(replayed.timeline.reserved[event]),
            free=replayed.free_at_oom.get(event, ()),
        )
        for event in np.flatnonzero(trace.kind == OOM).tolist()
    ]


def _peak(view: DeviceView) -> Peak:
    timeline, start = view.replayed.timeline, view.replayed.start
    event = int(np.argmax(timeline.allocated)) if len(view.trace) else -1
    if event < 0 or timeline.allocated[event] <= start[0]:
        event = -1
    return Peak(
        event=event,
        time_us=int(view.trace.time_us[max(event, 0)]) if len(view.trace) else 0,
        allocated=int(timeline.allocated[event]) if event >= 0 else start[0],
        reserved=int(timeline.reserved[event]) if event >= 0 else start[1],
        stranded=max(0, int(timeline.stranded[event])) if event >= 0 else view.end.stranded,
        owners=owned_bytes(alive_at(view.replayed, event), view.replayed.size, view.owners, view.sites),
    )


def _pinned(view: DeviceView) -> tuple[PinnedSegment, ...]:
    lives = _lives_at(view.replayed)

    def owner(address: int) -> str:
        return OWNERS[view.owners[lives[address]]] if address in lives else "before the recording"

    return tuple(
        PinnedSegment(each.segment, each.stranded, each.pins, tuple(owner(pin.address) for pin in each.pins))
        for each in stranded_segments(view.segments)
    )


def _site_rows(view: DeviceView, peak: Peak, growing: Mapping[int, float]) -> tuple[SiteRow, ...]:
    replayed, sites, count = view.replayed, view.sites, len(view.sites.names)
    at_peak, at_end = alive_at(replayed, peak.event), view.alive()
    traced = replayed.born >= 0

    def summed(lives: Mask) -> Int64s:
        totals = np.zeros(count, np.int64)
        np.add.at(totals, sites.of_life[lives], replayed.size[lives])
        return totals

    peaks, ends, totals = summed(at_peak), summed(at_end), summed(traced)
    blocks = np.bincount(sites.of_life[at_end], minlength=count)
    allocations = np.bincount(sites.of_life[traced], minlength=count)
    # owner and stack of a site: those of most bytes at the peak and at the end
    main = _main_by_site(view, at_peak | at_end)
    rows = [
        SiteRow(
            site=sites.names[site],
            owner=OWNERS[main[site][0]],
            stack=main[site][1],
            at_peak=int(peaks[site]),
            at_end=int(ends[site]),
            count_at_end=int(blocks[site]),
            allocations=int(allocations[site]),
            allocated=int(totals[site]),
            per_step=round(growing.get(site, 0)) if view.steps.count else None,
        )
        for site in np.unique(sites.of_life).tolist()
    ]
    return tuple(sorted(rows, key=lambda row: (-max(row.at_peak, row.at_end), -row.allocated, row.site)))


def _main_by_site(view: DeviceView, shown: Mask) -> dict[int, tuple[int, int]]:
    """The owner and the stack with the most bytes at each site; of all its lives if none is shown."""
    sites, replayed = view.sites, view.replayed
    seen = np.zeros(len(sites.names), np.bool_)
    seen[sites.of_life[shown]] = True
    counted = shown | ~seen[sites.of_life]
    keys = np.stack([sites.of_life[counted], view.owners[counted], replayed.stack[counted]], axis=1)
    distinct, where = np.unique(keys, axis=0, return_inverse=True)
    totals = np.zeros(len(distinct), np.int64)
    np.add.at(totals, where.reshape(-1), replayed.size[counted])
    main: dict[int, tuple[int, int]] = {}
    for index in np.argsort(totals, kind="stable").tolist():
        site, owner, stack = distinct[index].tolist()
        main[site] = owner, stack
    return main


def _one_pin(pinned: Sequence[PinnedSegment]) -> tuple[str, ...]:
    """Name a segment that is stranded nearly whole: reported as fragmentation only if steps do not use it."""
    if not pinned or pinned[0].stranded < max(FLOOR, _NEARLY_WHOLE * pinned[0].segment.size):
        return ()
    worst = pinned[0]
    return (
        f"{size(worst.stranded)} of a segment of {size(worst.segment.size)} is stranded by "
        f"{count(len(worst.pins), 'block')} ({worst.owners[0]}): free, and of use only to what fits there",
    )


def _contradicts(replayed: ReplayedTrace) -> bool:
    timeline = replayed.timeline
    return bool((timeline.allocated > timeline.reserved).any())


def _notes(trace: Events, replayed: ReplayedTrace, steps: Steps) -> tuple[str, ...]:
    notes = []
    if not len(trace):
        return ("no events were recorded: only what is alive at the snapshot is known",)
    if _contradicts(replayed):
        notes.append(
            "the file contradicts itself: more is allocated than reserved in it, so its figures over time "
            "can't be trusted"
        )
    if (replayed.born < 0).any():
        notes.append(
            f"{size(replayed.start[0])} were allocated before the first event (the recording began late, or "
            "its ring buffer dropped the oldest events); only blocks that remember their stack can be named"
        )
    if replayed.lost:
        notes.append(
            f"{replayed.lost:,} events contradict what came before: entries between are missing, and the "
            "figures before the last of these events are estimates"
        )
    if not steps.count:
        repeats = (
            f": a pattern repeats {count(steps.repeats, 'time')}, without a backward or an optimizer in it "
            "(if these are steps, name each with torch.profiler.record_function('ProfilerStep#N'))"
            if steps.repeats
            else ""
        )
        notes.append(f"no training steps were found, so that growth can't be judged{repeats}")
    if not replayed.stack.any():
        notes.append("no call stacks were recorded (`context=None`?): sites and most owners are unknown")
    unknown = int((trace.kind == OTHER_EVENT).sum())
    if unknown:
        notes.append(f"left out: {count(unknown, 'event')} of a kind that this version does not know")
    return tuple(notes)
