"""Bytes by the labels that the program gave: `_set_memory_metadata` and `_annotate_tensor` of torch. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from memtriage.allocator.replay import ReplayedTrace
from memtriage.allocator.trace_columns import TraceColumns
from memtriage.model.recording import ALLOC, LabelRow
from memtriage.snapshots.view import Mask


def label_rows(
    trace: TraceColumns, replayed: ReplayedTrace, at_peak: Mask, at_end: Mask
) -> tuple[LabelRow, ...]:
    """Return the bytes of each label, most first. A block with several labels counts for each of them.

    Args:
        trace: the events.
        replayed: their replay.
        at_peak, at_end: the lives at the peak and at the snapshot.
    """
    lives: dict[str, set[int]] = {}
    for life, label in _labelled(trace, replayed):
        lives.setdefault(label, set()).add(life)
    rows = [
        LabelRow(
            label=label,
            at_peak=sum(int(replayed.size[life]) for life in marked if at_peak[life]),
            at_end=sum(int(replayed.size[life]) for life in marked if at_end[life]),
            blocks=len(marked),
        )
        for label, marked in lives.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-max(row.at_peak, row.at_end), row.label)))


def _labelled(trace: TraceColumns, replayed: ReplayedTrace) -> Iterator[tuple[int, str]]:
    """Yield each life that has a label. An annotation names the block that is at its address then."""
    annotated = any(trace.kind[event] != ALLOC for event in trace.labels)
    births = zip(replayed.address.tolist(), replayed.born.tolist(), range(len(replayed.born)), strict=True)
    by_address = sorted(births) if annotated else []
    for event, label in trace.labels.items():
        if trace.kind[event] == ALLOC:
            yield int(replayed.life[event]), label
            continue
        address = int(trace.address[event])
        at = bisect_right(by_address, (address, event, len(by_address))) - 1
        if at >= 0 and by_address[at][0] == address:
            life = by_address[at][2]
            if not 0 <= replayed.died[life] < event:
                yield life, label
