"""Recordings made by hand: a tape of allocator calls, replayed in the simplest correct way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from memtriage.account.gpu_ledger import segment_totals, stranded_segments
from memtriage.model.blocks import DEFAULT_POOL, Block, Segment
from memtriage.model.findings import Finding
from memtriage.model.recording import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    OWNERS,
    SEGMENT_ALLOC,
    DeviceRecording,
    Events,
    Figures,
    FreeRange,
    Lives,
    OomEvent,
    OwnedBytes,
    Peak,
    PinnedSegment,
    Recording,
    SiteRow,
    Stack,
    Steps,
    Timeline,
)

MIB = 1024 * 1024
BEGAN_US = 1_800_000_000_000_000


@dataclass
class _Life:
    address: int
    size: int
    requested: int
    stack: int
    owner: str
    segment: int
    born: int
    died: int = -1
    gone: int = -1


@dataclass
class Tape:
    """Records allocator calls on one device, one every `every_us`; `end` makes the `DeviceRecording`.

    Addresses are given out one after the other within a segment and never twice.
    """

    stacks: list[Stack]
    device: str = "cuda:0"
    every_us: int = 10
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    _events: list[dict[str, int]] = field(default_factory=list)
    _figures: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    _lives: list[_Life] = field(default_factory=list)
    _segments: list[dict[str, Any]] = field(default_factory=list)
    _step_ends: list[int] = field(default_factory=list)
    _ooms: list[OomEvent] = field(default_factory=list)

    def segment(
        self, size: int, *, stream: int = 0, pool: tuple[int, int] = DEFAULT_POOL, page: int | None = None
    ) -> int:
        """Reserve a segment and return its index."""
        address = (len(self._segments) + 1) << 40
        self._segments.append(
            {"address": address, "size": size, "stream": stream, "pool": pool, "page": page, "used": 0}
        )
        self._event(SEGMENT_ALLOC, address, size, stream)
        return len(self._segments) - 1

    def alloc(
        self, segment: int, size: int, owner: str, *, stack: int = 0, requested: int | None = None
    ) -> int:
        """Take the next bytes of a segment and return the life's index."""
        at = self._segments[segment]
        address = at["address"] + at["used"]
        at["used"] += size
        assert at["used"] <= at["size"], "the tape ran over the segment's end"
        life = _Life(address, size, requested or size, stack, owner, segment, born=len(self._events))
        self._lives.append(life)
        self._event(ALLOC, address, life.requested, at["stream"], stack)
        return len(self._lives) - 1

    def free(self, life: int, *, complete: bool = True) -> None:
        """Free a block; without `complete` it awaits its stream."""
        freed = self._lives[life]
        freed.died = len(self._events)
        self._event(FREE_REQUESTED, freed.address, freed.requested, 0, freed.stack)
        if complete:
            freed.gone = len(self._events)
            self._event(FREE_COMPLETED, freed.address, freed.requested, 0, freed.stack)

    def step(self) -> None:
        """End a training step."""
        self._step_ends.append(len(self._events))

    def oom(self, requested: int, *, device_free: int | None = None, stack: int = 0) -> None:
        """Refuse an allocation."""
        allocated, _, reserved, *_ = self._now()
        free = tuple(
            FreeRange(block.address, block.size, segment.stream, segment.pool, segment.address, False)
            for segment in self._snapshot()
            for block in segment.blocks
            if block.state == "free"
        )
        at = len(self._events)
        time_us = BEGAN_US + at * self.every_us
        self._ooms.append(OomEvent(at, time_us, requested, device_free, 0, stack, allocated, reserved, free))
        self._event(OOM, 0, requested, 0, stack)

    def end(self) -> DeviceRecording:
        events, lives, segments = self._events, self._lives, self._snapshot()
        totals = segment_totals(segments)
        figures = np.asarray(self._figures, dtype=np.int64).reshape(len(events), 5)
        course = Timeline(*(figures[:, column] for column in range(5)))
        top = int(course.allocated.argmax()) if len(events) else -1
        peak = Peak(
            top,
            BEGAN_US + top * self.every_us,
            *((int(course.allocated[top]), int(course.reserved[top])) if events else (0, 0)),
            int(course.stranded[top]) if events else 0,
            self._owned(top),
        )
        owner_at = {life.address: life.owner for life in lives if life.gone < 0}
        pools = tuple(dict.fromkeys((DEFAULT_POOL, *(segment["pool"] for segment in self._segments))))
        return DeviceRecording(
            device=self.device,
            events=Events(
                time_us=_ints(BEGAN_US + number * self.every_us for number in range(len(events))),
                kind=np.asarray([event["kind"] for event in events], np.uint8),
                address=_ints(event["address"] for event in events),
                size=_ints(event["size"] for event in events),
                stream=_ints(event["stream"] for event in events),
                stack=np.asarray([event["stack"] for event in events], np.int32),
                pool={
                    life.born: pool
                    for life in lives
                    if (pool := self._segments[life.segment]["pool"]) != DEFAULT_POOL
                },
            ),
            lives=Lives(
                **{name: np.asarray([getattr(live, name) for live in lives], np.int32) for name in _ENDS},
                **{name: _ints(getattr(live, name) for live in lives) for name in _SIZES},
                stream=_ints(self._segments[live.segment]["stream"] for live in lives),
                owner=np.asarray([OWNERS.index(live.owner) for live in lives], np.uint8),
                pool=np.asarray(
                    [pools.index(self._segments[live.segment]["pool"]) for live in lives], np.int16
                ),
            ),
            timeline=course,
            pools=pools,
            start=(0, 0),
            end=Figures(
                allocated=totals.allocated,
                reserved=totals.reserved,
                requested=totals.requested,
                rounding=totals.rounding,
                releasable=totals.releasable - self._private_free(segments),
                stranded=totals.stranded,
                awaiting=totals.awaiting,
                private_pools=totals.private_pools,
                private_pools_free=self._private_free(segments),
            ),
            segments=tuple(segments),
            pinned=tuple(
                PinnedSegment(
                    segment.segment,
                    segment.stranded,
                    segment.pins,
                    tuple(owner_at[pin.address] for pin in segment.pins),
                )
                for segment in stranded_segments(segments)
            ),
            peak=peak,
            owners=self._owned(len(events)),
            sites=self._sites(top),
            steps=Steps(tuple(self._step_ends), "annotations" if self._step_ends else "none"),
            ooms=tuple(self._ooms),
            exact_from_us=None,
            notes=tuple(self.notes),
            findings=tuple(self.findings),
        )

    def _event(self, kind: int, address: int, size: int, stream: int, stack: int = -1) -> None:
        self._events.append(
            {"kind": kind, "address": address, "size": size, "stream": stream, "stack": stack}
        )
        self._figures.append(self._now())

    def _now(self) -> tuple[int, int, int, int, int]:
        segments = self._snapshot()
        totals, private = segment_totals(segments), self._private_free(segments)
        active = totals.allocated + totals.awaiting
        return totals.allocated, active, totals.reserved, totals.releasable - private, private

    @staticmethod
    def _private_free(segments: Sequence[Segment]) -> int:
        return segment_totals(segment for segment in segments if segment.pool != DEFAULT_POOL).releasable

    def _snapshot(self) -> list[Segment]:
        blocks: dict[int, list[Block]] = {index: [] for index in range(len(self._segments))}
        for live in self._lives:
            state = "active" if live.died < 0 else "awaiting" if live.gone < 0 else "free"
            asked = live.requested if state != "free" else 0
            site = self.stacks[live.stack].site
            blocks[live.segment].append(
                Block(address=live.address, size=live.size, requested=asked, state=state, site=site)
            )
        return [
            Segment(
                device=int(self.device.partition(":")[2]),
                address=row["address"],
                size=row["size"],
                stream=row["stream"],
                pool=row["pool"],
                expandable=row["page"] is not None,
                page=row["page"],
                blocks=(*blocks[index], *_rest(row)),
            )
            for index, row in enumerate(self._segments)
        ]

    def _alive(self, event: int) -> list[_Life]:
        return [live for live in self._lives if live.born <= event and (live.died < 0 or live.died > event)]

    def _owned(self, event: int) -> tuple[OwnedBytes, ...]:
        total: Counter[tuple[str, str]] = Counter()
        number: Counter[tuple[str, str]] = Counter()
        for live in self._alive(event):
            key = live.owner, self.stacks[live.stack].site
            total[key] += live.size
            number[key] += 1
        return tuple(OwnedBytes(*key, amount, number[key]) for key, amount in total.most_common())

    def _sites(self, top: int) -> tuple[SiteRow, ...]:
        rows: dict[str, SiteRow] = {}
        steps = len(self._step_ends)
        for number, live in enumerate(self._lives):
            site = self.stacks[live.stack].site
            row = rows.get(site) or SiteRow(site, live.owner, live.stack, 0, 0, 0, 0, 0, 0 if steps else None)
            rows[site] = replace(
                row,
                at_peak=row.at_peak + (live.size if live in self._alive(top) else 0),
                at_end=row.at_end + (live.size if live.died < 0 else 0),
                count_at_end=row.count_at_end + (live.died < 0),
                allocations=row.allocations + 1,
                allocated=row.allocated + self._lives[number].size,
            )
        return tuple(sorted(rows.values(), key=lambda row: -max(row.at_peak, row.at_end)))


_ENDS = ("born", "died", "gone", "stack")
_SIZES = ("address", "size", "requested")


def recording(
    *devices: DeviceRecording,
    stacks: Sequence[Stack],
    path: str = "run.pickle",
) -> Recording:
    """Put devices together as a file."""
    return Recording(path, devices, tuple(stacks), {"expandable_segments": False})


def stack(site: str, *outer: str) -> Stack:
    """Return a call stack whose innermost frame is the site."""
    return Stack(site, (site, *outer))


def training(steps: int = 4, *, device: str = "cuda:0", leak: int = 0) -> tuple[DeviceRecording, list[Stack]]:
    """Return a small run: weights, activations that come and go, and `leak` bytes more at each step."""
    stacks = [
        stack("model.py:10 in __init__", "train.py:5 in main"),
        stack("model.py:20 in forward", "train.py:9 in main"),
        stack("train.py:12 in log", "train.py:11 in main"),
    ]
    tape = Tape(stacks, device=device)
    weights = tape.segment(32 * MIB)
    tape.alloc(weights, 24 * MIB, "parameter", stack=0, requested=24 * MIB - 100)
    for number in range(steps):
        work = tape.segment(64 * MIB, stream=0 if number % 2 else 7)
        saved = [tape.alloc(work, 8 * MIB, "saved for backward", stack=1) for _ in range(3)]
        if leak:
            tape.alloc(work, leak, "variable", stack=2)
        for life in saved:
            tape.free(life)
        tape.step()
    if leak:
        tape.findings = [
            Finding(
                kind="leak",
                device=device,
                bytes=leak * steps,
                bytes_per_step=leak,
                allocated_at=stacks[2].site,
                mechanism="a list keeps a tensor of every step",
                fix="append the number instead",
                playbook="M21",
                step=2,
                evidence=["it is there after every step"],
            )
        ]
    return tape.end(), stacks


def _rest(segment: dict[str, Any]) -> list[Block]:
    used, total = segment["used"], segment["size"]
    if used == total:
        return []
    return [Block(address=segment["address"] + used, size=total - used, requested=0, state="free")]


def _ints(values: Iterable[int]) -> Any:
    return np.asarray(list(values), dtype=np.int64)
