"""Evidence of growth for tests: counters and censuses of a run whose growth the test knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from memtriage.diagnose.growth.evidence import Evidence
from memtriage.model.evidence import CensusSeen, DataSeen, HolderSeen, Situation
from memtriage.model.paths import ANY_ITEM, HolderPath
from memtriage.model.position import Scale, TrainingPosition
from support.paths import named

Found = Iterable[HolderSeen | DataSeen]
BASE = 100 * 1024**2
"""Bytes in use before anything grows."""


def items(name: str) -> HolderPath:
    """Path to the items of a container."""
    return (*named(name), ANY_ITEM)


def held(nbytes: float, count: int = 1, *, name: str = "kept", number: int = 1, **more: Any) -> HolderSeen:
    """A list with so many storages."""
    path = items(name)
    found = {"device": "cpu", "anchor": path, "path": path, "owner": "variable", "entries": count, **more}
    return HolderSeen(id=number, nbytes=int(nbytes), storages=count, **found)


def data(entries: int, entry_bytes: int, *, name: str = "rows", number: int = 1, **more: Any) -> DataSeen:
    """A list of ordinary data."""
    return DataSeen(
        id=number, path=items(name), kind="list", entries=entries, entry_bytes=entry_bytes, **more
    )


def position(at: float, scale: Scale = "step", per_step: int = 1) -> TrainingPosition:
    """Where a program stands that counts its steps, its backwards alone, or neither."""
    if scale == "second":
        return TrainingPosition(time_s=at)
    number = int(at)
    if scale == "microbatch":
        return TrainingPosition(backwards=number, microbatch=number, time_s=at)
    return TrainingPosition(
        step=number, microbatch=per_step, backwards=per_step * number, microbatches_per_step=per_step,
        at_step_end=True, time_s=at,
    )  # fmt: skip


def observed(
    counters: Mapping[str, Sequence[float]],
    found: Callable[[int], Found] = lambda at: (),
    censuses: Iterable[int] = (),
    *,
    scale: Scale = "step",
    per_step: int = 1,
    last: Mapping[str, Any] | None = None,
    situation: Mapping[str, Any] | None = None,
    **census: Any,
) -> Evidence:
    """Observe a run at the positions 1, 2, ...

    Args:
        counters: bytes at each position, by counter.
        found: returns what a census at a position finds.
        censuses: their positions.
        scale: what positions count.
        per_step: backwards per step.
        last: fields of the last census that differ.
        situation: fields of the situation at the end.
        census: fields of all censuses; by default, their totals are those of the holders.
    """
    evidence = Evidence()
    length = max(map(len, counters.values()), default=0)
    for at in range(1, length + 1):
        for name, values in counters.items():
            if at <= len(values):
                evidence.run[scale].read(at, {name: int(values[at - 1])})
    here: set[int] = set()
    positions = list(censuses)
    for at in positions:
        seen = list(found(at))
        holders = [each for each in seen if isinstance(each, HolderSeen)]
        now = {each.id for each in holders}
        totals: dict[str, int] = {}
        for each in holders:
            totals[each.device] = totals.get(each.device, 0) + each.size
        fields = {"totals": totals, **census, **((last or {}) if at == positions[-1] else {})}
        evidence.add(
            CensusSeen(
                position=position(at, scale, per_step), work_s=float(at), holders=holders,
                gone=sorted(here - now), data=[each for each in seen if isinstance(each, DataSeen)], **fields,
            )
        )  # fmt: skip
        here = now
    known = {"readable": dict.fromkeys(counters, True), **(situation or {})}
    evidence.add(Situation(position=position(max(length, *positions, 0), scale, per_step), **known))
    return evidence
