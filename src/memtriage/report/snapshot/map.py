"""The segments of a recorded device as a map's columns: every part of every segment, with state and owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memtriage.account.segments import whole_pages
from memtriage.model.blocks import Block, Segment
from memtriage.model.recording import NO_FRAMES, DeviceRecording, PinnedSegment
from memtriage.model.units import count, size
from memtriage.report.html.columns import Texts, pack
from memtriage.report.snapshot.words import where

_USED: Final = 0
_AWAITING: Final = 1
_STRANDED: Final = 2
_RELEASABLE: Final = 3
_MIXED: Final = 4
"""States of a part, as in `assets/snapshot_segments.js`; mixed: parts in several states, drawn together."""

_NO_OWNER: Final = 255
_SMALLEST_BLOCK: Final = 512
"""Bytes: the allocator rounds every block up to a multiple of this."""
_JOINED: Final = 4
"""Blocks of the cutoff's size that are drawn together at most, so that the map keeps its detail."""
_SEGMENTS: Final = 4000
"""Segments of a device that are drawn, the biggest first."""
_PINNED_ROWS: Final = 60
_PINS: Final = 3
"""Sites that are named for a pinned segment, the biggest first."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """Columns: parts of segments, in the order of segments and addresses."""

    segment: NDArray[np.int64]
    size: NDArray[np.int64]
    requested: NDArray[np.int64]
    state: NDArray[np.int64]
    owner: NDArray[np.int64]
    site: NDArray[np.int64]
    count: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.size)


def segment_map(device: DeviceRecording, texts: Texts, parts: int) -> dict[str, Any]:
    """Return the columns of a device's map.

    Args:
        device: what to draw.
        texts: where sites go.
        parts: blocks and free ranges to return, at most about this many; where there are more, neighbors
            below a size are drawn as one part that tells how many it is.
    """
    order = sorted(
        device.segments, key=lambda segment: (segment.pool, segment.stream, -segment.size, segment.address)
    )
    left_out = sorted(order, key=lambda segment: -segment.size)[_SEGMENTS:]
    if left_out:
        order = [segment for segment in order if segment not in set(left_out)]
    groups = list(dict.fromkeys((segment.pool, segment.stream) for segment in order))
    number = {group: index for index, group in enumerate(groups)}
    whole = _collect(device, order, texts)
    shown = _merge(whole, parts)
    stranded = {pinned.segment.address: pinned.stranded for pinned in device.pinned}
    columns = {
        "group": [number[segment.pool, segment.stream] for segment in order],
        "size": [segment.size for segment in order],
        "stranded": [stranded.get(segment.address, 0) for segment in order],
    }
    return {
        "segments": {
            **{name: pack(np.asarray(column, dtype=np.int64)) for name, column in columns.items()},
            "parts": pack(np.bincount(shown.segment, minlength=len(order)).astype(np.int64)),
        },
        "addresses": [f"{segment.address:#x}" for segment in order],
        "parts": {
            name: pack(getattr(shown, name))
            for name in ("size", "requested", "state", "owner", "site", "count")
        },
        "groups": [_group_words(group, order) for group in groups],
        "note": _note(device, left_out, len(whole), len(shown)),
        "pinned": [_pinned(pinned, texts) for pinned in device.pinned[:_PINNED_ROWS]],
    }


def _collect(device: DeviceRecording, order: Sequence[Segment], texts: Texts) -> _Parts:
    rows = [(index, *part) for index, segment in enumerate(order) for part in _segment_parts(segment, texts)]
    table = np.asarray(rows, dtype=np.int64).reshape(len(rows), 6)
    segment, address, length, requested, state, site = table.T
    return _Parts(
        segment=segment,
        size=length,
        requested=requested,
        state=state,
        owner=np.where(state <= _AWAITING, _owners_at(device, address), _NO_OWNER),
        site=site,
        count=np.ones(len(rows), dtype=np.int64),
    )


def _segment_parts(segment: Segment, texts: Texts) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield address, size, requested bytes, state and site of what a segment consists of."""
    pinned = any(block.state != "free" for block in segment.blocks)
    for block in segment.blocks:
        if block.state != "free":
            site = texts.add(block.site or NO_FRAMES)
            state = _USED if block.state == "active" else _AWAITING
            yield block.address, block.size, block.requested, state, site
        elif pinned:
            yield from _free_parts(block, segment)
        else:
            yield block.address, block.size, 0, _RELEASABLE, -1


def _free_parts(block: Block, segment: Segment) -> Iterator[tuple[int, int, int, int, int]]:
    start, end = whole_pages(block, segment)
    for first, last, state in (
        (block.address, start, _STRANDED),
        (start, end, _RELEASABLE),
        (end, block.end, _STRANDED),
    ):
        if first < last:
            yield first, last - first, 0, state, -1


def _owners_at(device: DeviceRecording, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the owner of the block that is at each address at the snapshot."""
    lives = device.lives
    alive = np.flatnonzero(lives.gone == -1)
    if not len(alive):
        return np.full(len(addresses), _NO_OWNER, dtype=np.int64)
    alive = alive[np.argsort(lives.address[alive], kind="stable")]
    known = lives.address[alive]
    place = np.minimum(np.searchsorted(known, addresses), len(known) - 1)
    return np.where(known[place] == addresses, lives.owner[alive[place]].astype(np.int64), _NO_OWNER)


def _merge(parts: _Parts, limit: int) -> _Parts:
    """Draw small neighbors together, with a cutoff that is doubled until there are few enough parts.

    A segment never has less than one part, so there can be more than `limit`.
    """
    shown, cutoff = parts, _SMALLEST_BLOCK
    while len(shown) > limit and len(shown) > len(np.unique(parts.segment)):
        shown = _merged(parts, cutoff)
        cutoff *= 2
    return shown


def _merged(parts: _Parts, cutoff: int) -> _Parts:
    """Join neighbors of at most `cutoff` bytes that begin in the same stretch of a segment."""
    starts = np.cumsum(parts.size) - parts.size
    starts -= starts[np.searchsorted(parts.segment, parts.segment)]
    stretch = starts // (_JOINED * cutoff)
    small = parts.size <= cutoff
    alike = (parts.segment[1:] == parts.segment[:-1]) & (stretch[1:] == stretch[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~(small[1:] & small[:-1] & alike))))
    counts = np.diff(first, append=len(parts))
    # The biggest part stands for those it is joined with.
    group = np.repeat(np.arange(len(first)), counts)
    biggest = np.lexsort((parts.size, group))[first + counts - 1]
    used = parts.state <= _AWAITING
    same = np.minimum.reduceat(parts.state, first) == np.maximum.reduceat(parts.state, first)
    return _Parts(
        segment=parts.segment[first],
        size=np.add.reduceat(parts.size, first),
        requested=np.where(
            same, np.add.reduceat(parts.requested, first), np.add.reduceat(used * parts.size, first)
        ),
        state=np.where(same, parts.state[biggest], _MIXED),
        owner=np.where(same, parts.owner[biggest], _NO_OWNER),
        site=np.where(same, parts.site[biggest], -1),
        count=np.add.reduceat(parts.count, first),
    )


def _group_words(group: tuple[tuple[int, int], int], order: Sequence[Segment]) -> str:
    mine = [segment for segment in order if (segment.pool, segment.stream) == group]
    kind = ", expandable" if any(member.expandable for member in mine) else ""
    total = size(sum(member.size for member in mine))
    return f"{where(*group)}{kind}: {total} in {count(len(mine), 'segment')}"


def _note(device: DeviceRecording, left_out: Sequence[Segment], whole: int, shown: int) -> str:
    words = [f"{count(len(device.segments), 'segment')}, {count(whole, 'block')}"]
    if left_out:
        words.append(f"without the {count(len(left_out), 'smallest segment')}")
    if shown < whole:
        words.append(f"small neighbors drawn together: {count(shown, 'part')}")
    return "; ".join(words)


def _pinned(pinned: PinnedSegment, texts: Texts) -> dict[str, Any]:
    total: Counter[tuple[str, str]] = Counter()
    blocks: Counter[tuple[str, str]] = Counter()
    for block, owner in zip(pinned.pins, pinned.owners, strict=True):
        total[owner, block.site or NO_FRAMES] += block.size
        blocks[owner, block.site or NO_FRAMES] += 1
    named = total.most_common()
    rest = named[_PINS:]
    return {
        "stranded": pinned.stranded,
        "size": pinned.segment.size,
        "where": where(pinned.segment.pool, pinned.segment.stream),
        "pins": [
            {"owner": owner, "site": texts.add(site), "bytes": amount, "count": blocks[owner, site]}
            for (owner, site), amount in named[:_PINS]
        ],
        "more": {"bytes": sum(amount for _, amount in rest), "count": sum(blocks[key] for key, _ in rest)}
        if rest
        else None,
    }
