"""Put growth in words: findings of what leaks, and why growth could not be judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from memtriage.catalogue.growing import NATIVE, PROFILER, growing_part
from memtriage.diagnose.cuts import as_found
from memtriage.diagnose.growth.attribution import Open, Rise, counted
from memtriage.diagnose.growth.evidence import ENOUGH_MARKS, HEAP, Evidence
from memtriage.diagnose.growth.facts import JudgedDevice, Leak
from memtriage.diagnose.growth.judgment import judge
from memtriage.diagnose.held import Held
from memtriage.diagnose.mechanisms import mechanism_of
from memtriage.model.evidence import DataSeen
from memtriage.model.findings import GROWING, Finding
from memtriage.model.judged import Judged
from memtriage.model.paths import in_words
from memtriage.model.position import Scale
from memtriage.model.units import count, duration, rate, size
from memtriage.playbook.entries import LEAKS
from memtriage.playbook.mechanisms import MECHANISMS, MechanismText
from memtriage.store.reader import RankRecord
from memtriage.store.records import failed

NOT_NAMED: Final = "not named"
"""Holder of growth that no census covers."""
CPP_ONLY: Final = "C++ only (nothing that a census lists explains it)"
STARTED: Final = "what started them: a loader, pool or executor that is kept"
OPEN_SEGMENTS: Final = "open segments of shared memory that no process maps"
_SPANS: Final[Mapping[Scale, str]] = {"step": "steps", "microbatch": "backwards", "second": "seconds"}
_WHY: Final[Mapping[Open, str]] = {
    "few": "it was seen to grow too seldom, or too irregularly, to be certain",
    "once": "it was only seen at the end: the program makes no step and calls no module in a loop",
    "slows": "it grows more and more slowly, or unevenly",
    "fills": "it grows more and more slowly, as a cache does that fills to its bound",
    "aged": "it may have stopped since the last census",
    "replaced": "its entries are replaced by new ones, and no counter shows that memory grows",
    "not resident": "the resident set does not grow with it",
    "was mapped": "it may fill memory that was mapped before, and end with that",
    "new shapes": "a cache with an entry for each shape of the input may still be filling",
    "not covered": "the censuses since then do not show what holds it",
}
_ROLES: Final = 8
"""Processes that the evidence of one leak lists."""
_PARTS: Final = 4
"""Parts of a leak that its evidence lists."""


def findings_of(leaks: Iterable[Leak], rank: int | None = None) -> list[Finding]:
    """Return the findings of leaks on a rank."""
    return [_finding(leak, rank) for leak in leaks]


def _finding(leak: Leak, rank: int | None) -> Finding:
    why = _mechanism(leak)
    return Finding(
        kind=leak.kind,
        device=leak.device,
        rank=rank,
        bytes=leak.nbytes,
        bytes_step=leak.nbytes_step,
        bytes_per_step=leak.rates.get("step"),
        bytes_per_microbatch=leak.rates.get("micro-batch"),
        bytes_per_second=leak.rates.get("second"),
        event=leak.event,
        bytes_per_event=None if leak.event is None else round(leak.rate * leak.spacing),
        where=leak.where,
        process=leak.process,
        certainty=leak.certainty,
        holder=_holder(leak),
        holder_path=leak.path,
        also_held_by_paths=list(leak.also_held_by),
        allocated_at=leak.allocated_at,
        stored_at=leak.stored_at,
        mechanism=why.mechanism,
        fix=why.fix,
        cuts=as_found(leak.cause) if isinstance(leak.cause, Held) else [],
        playbook=LEAKS,
        step=leak.step,
        projection=leak.projection,
        evidence=list(_evidence(leak)),
    )


def _holder(leak: Leak) -> str:
    if leak.path is not None:
        return in_words(leak.path)
    if leak.cause == "shared memory":
        return OPEN_SEGMENTS
    if leak.cause == "processes":
        return STARTED
    named = isinstance(leak.shown_by, Rise) or "not covered" in leak.shown_by.reasons
    return NOT_NAMED if named else CPP_ONLY


def _mechanism(leak: Leak) -> MechanismText:
    """Return why something grows, and what to change."""
    cause = leak.cause
    if isinstance(cause, DataSeen):
        return _objects(cause)
    if cause == "profiler":
        return MechanismText(PROFILER.why, PROFILER.fix)
    if cause == "native code" and leak.device.startswith("cuda:"):
        return MECHANISMS["native code on a GPU"]
    if cause == "native code":
        known = " ".join(f"Where {calls}, {change}." for calls, change in NATIVE.items())
        return MECHANISMS[cause].filled({"known": known})
    if cause in ("not read", "processes"):
        return MECHANISMS[cause].filled({"why": leak.unread or "it was read too seldom while it lived"})
    if isinstance(cause, str):
        return MECHANISMS[cause]
    return mechanism_of(cause)


def _objects(seen: DataSeen) -> MechanismText:
    """Say why objects of C++ pile up in a container."""
    path, part, kind = in_words(seen.path), growing_part(seen.classes), seen.native or ""
    if part is not None:
        return MechanismText(f"{path} gets new objects of type {kind}: {part.why}", part.fix)
    if "ProcessGroup" in kind or seen.path[0].name.startswith("torch.distributed"):
        return MECHANISMS["process groups"]
    return MECHANISMS["objects of C++"].filled({"subject": path, "type": kind})


# --- what a finding rests on --------------------------------------------------------------------------------


def _evidence(leak: Leak) -> Iterator[str]:
    if leak.comes_every is not None:
        apart = round(leak.comes_every)
        yield f"it grows by {size(round(apart * leak.rate))} at a time, every {apart} steps"
    if leak.parts and len({part.path for part in leak.parts}) == 1:  # two kinds of evidence for one holder
        for part in leak.parts:
            yield from _evidence(replace(part, comes_every=None))
        return
    if leak.parts:
        # The evidence of several parts would be contradictory. So give that of one with the same certainty.
        first = next(part for part in leak.parts if part.certainty == leak.certainty)
        named = [first, *(part for part in leak.parts if part is not first)]
        more = f"; {len(named) - _PARTS} more" if len(named) > _PARTS else ""
        yield f"the sum of: {'; '.join(map(_share, named[:_PARTS]))}{more}"
        yield from (
            f"the first of these: {line}"
            for line in _evidence(replace(first, projection=None, comes_every=None))
        )
    else:
        yield _shown_by(leak)
        yield from (f"suspected only: {_WHY[reason]}" for reason in leak.shown_by.reasons)
        if isinstance(leak.shown_by, Rise) and leak.shown_by.holders:
            detail = leak.shown_by.holders[-1].detail
            if detail is not None and detail.saved_by:
                yield f"the largest storage is kept for backward by {detail.saved_by}"
    if leak.by_role:
        per, listed = next(iter(leak.rates), "step"), leak.by_role[:_ROLES]
        more = f" and {len(leak.by_role) - _ROLES} more" if len(leak.by_role) > _ROLES else ""
        yield f"per {per}: {', '.join(f'{size(grown)} in {role}' for role, grown in listed)}{more}"
    if leak.projection is not None:
        yield str(leak.projection)
    if leak.on_host:
        yield f"in addition {size(leak.on_host)} of host memory: nodes of the autograd graph"


def _share(part: Leak) -> str:
    per = next(iter(part.rates), "step")
    return f"{size(part.rate)} per {per} at {_holder(part)}"


def _shown_by(leak: Leak) -> str:
    shown = leak.shown_by
    if isinstance(shown, Rise):
        seen = shown.seen
        return _entries(shown, seen, leak.scale) if isinstance(seen, DataSeen) else _sizes(shown, leak.scale)
    per = _SPANS[leak.scale].removesuffix("s")
    if leak.cause == "processes":
        of_all = "their number, times what each has of its own,"
        return f"{of_all} rises by {size(round(shown.growth.rate))} per {per}"
    if leak.cause in ("other anonymous memory", "mapped shared memory"):
        return f"from census to census it grows by {size(round(shown.growth.rate))} per {per}"
    handed_out = "what malloc and Python have handed out"
    what = handed_out if shown.counter == HEAP else f"the counter of {shown.counter}"
    return (
        f"{what} rises by {size(round(shown.growth.rate))} per {per} "
        f"({size(round(shown.growth.low))} to {size(round(shown.growth.high))}); "
        f"censuses name {size(round(shown.named))} of it"
    )


def _sizes(rise: Rise, scale: Scale) -> str:
    """`3 censuses, at steps 3, 6, 12: 1.0, 4.0, 10.0 MiB at the same place; 9 more storages`."""
    holders = rise.holders
    at = ", ".join(f"{position:.4g}" for position, _ in rise.points)
    held = ", ".join(size(counted(seen)) for seen, _ in zip(holders, rise.points, strict=False))
    more, nodes = holders[-1].storages - holders[0].storages, holders[-1].nodes - holders[0].nodes
    storages = f"; {more:,} more storages" if more else ""
    graph = f"; {nodes:,} more autograd nodes" if nodes > 0 else ""
    censuses = f"{len(rise.points)} censuses, at {_SPANS[scale]} {at}"
    return f"{censuses}: {held} at the same place{storages}{graph}"


def _entries(rise: Rise, seen: DataSeen, scale: Scale) -> str:
    first, last = (
        round(nbytes / max(1, seen.entry_bytes)) for _, nbytes in (rise.points[0], rise.points[-1])
    )
    between = f"between {_SPANS[scale]} {rise.since:.4g} and {rise.last:.4g}"
    if seen.lengthens:
        sizes = f"from {size(first * seen.entry_bytes)} to {size(last * seen.entry_bytes)}"
        return f"{sizes} {between}, with the same beginning or end"
    more = f"{last - first:,} more entries of about {size(seen.entry_bytes)}"
    return f"{more} {between}, tensors not counted"


# --- what the judgment of a device rests on -----------------------------------------------------------------


def judged_in_words(
    judged: Mapping[str, JudgedDevice], *, script_failed: bool = False, steps: int = 0, torch: bool = True
) -> dict[str, Judged]:
    """Say by device why growth could not be judged.

    Args:
        judged: by device.
        script_failed: whether it ended by an exception or with a nonzero status.
        steps: its optimizer steps.
        torch: whether it imported torch.
    """
    why = "{}"
    if script_failed:
        after = f"after {count(steps, 'step')}: {{}}"
        why = f"the script failed {after if steps else 'before its first step'}"
    elif not torch and not steps:
        why = "torch was not imported: {}"
    return {device: _judged(each, why) for device, each in judged.items()}


def _judged(judged: JudgedDevice, why: str) -> Judged:
    reason = _reason(judged)
    if judged.scale is not None and judged.points < ENOUGH_MARKS:
        reason = why.format(reason)
    return Judged(
        scale=judged.scale,
        points=judged.points,
        detection_limit=judged.limit,
        reason=reason,
        note=_note(judged),
    )


def _unit(judged: JudgedDevice) -> str:
    return {"step": "step", "microbatch": "backward"}.get(judged.scale or "", "second")


def _reason(judged: JudgedDevice) -> str | None:
    unit = _unit(judged)
    match judged.obstacle:
        case None:
            return None
        case "no counter":
            return "no counter of it can be read"
        case "few" if unit == "second":
            return f"no step was seen; {ENOUGH_MARKS} steps, or more time without any, are needed"
        case "few":
            few = f"{count(judged.points, unit)} {'is' if judged.points == 1 else 'are'} too few"
            return f"{few}, {ENOUGH_MARKS} are needed"
        case "may end":
            grows = f"suspected growth of {rate(round(judged.figure), unit)}"
            return f"{grows}, which may end by itself; run longer to confirm"
        case "unread":
            return f"its counter was not read after {unit} {judged.figure:.4g}"
        case "small":
            return f"it grew by less than {size(round(judged.figure))}"
        case "lived":
            return f"it lived {duration(judged.figure)}"
        case "restless":
            return "the counter moves too much: no growth of any size would show"


def _note(judged: JudgedDevice) -> str | None:
    if judged.waiting is None:
        return None
    nbytes, most, at = judged.waiting
    return f"{size(nbytes)} in garbage cycles of {most} awaited the collector at {_unit(judged)} {at:.4g}"


# --- records ------------------------------------------------------------------------------------------------


def judged_again(rank: RankRecord) -> RankRecord:
    """Return a rank's record with the growth that its evidence shows, instead of what was found when it ran.

    A record without evidence (of schema 1) stays as it is, and so do findings of other kinds. A process that
    was killed is judged from what is there.
    """
    if not rank.evidence:
        return rank
    judgment = judge(Evidence.of(rank.evidence))
    growing = findings_of(judgment.leaks, rank.start.rank)
    kept = [finding for finding in rank.findings if finding.kind not in GROWING]
    deaths = [finding for finding in kept if finding.kind == "out_of_memory" and not finding.ahead]
    findings = [*deaths, *growing, *(finding for finding in kept if finding not in deaths)]
    if rank.end is None:
        return replace(rank, interim_findings=findings)
    script_failed = failed(rank.end.exit_code, rank.end.exception)
    judged = judged_in_words(judgment.judged, script_failed=script_failed, steps=rank.end.steps)
    return replace(rank, final_findings=findings, end=msgspec.structs.replace(rank.end, judged=judged))
