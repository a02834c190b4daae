"""What a judgment rests on, of a run, of several ranks, and in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from memtriage.diagnose.growth.evidence import ENOUGH_MARKS
from memtriage.model.judged import Judged
from memtriage.model.units import count, devices_in_words, duration, rate


def with_circumstances(
    judged: Mapping[str, Judged], *, failed: bool, steps: int, torch: bool
) -> dict[str, Judged]:
    """Say why a run was too short, if that is because the program failed or does not use torch.

    Args:
        judged: by device, as `judge` returned it.
        failed: whether an exception ended the program.
        steps: its optimizer steps.
        torch: whether it imported torch.
    """
    if failed:
        why = f"the script failed after {count(steps, 'step')}" if steps else "the script failed at once"
    elif not torch and not steps:
        why = "torch was not imported"
    else:
        return dict(judged)
    return {
        device: msgspec.structs.replace(judgment, reason=f"{why}: {judgment.reason}")
        if judgment.scale is not None and judgment.points < ENOUGH_MARKS
        else judgment
        for device, judgment in judged.items()
    }


def weakest(judged: Iterable[Judged]) -> Judged:
    """Return the judgment that proves least: one with a reason, then growth, then the highest limit.

    Args:
        judged: of the same device on several ranks, at least one.
    """
    return max(judged, key=_weakness)


def _weakness(judgment: Judged) -> tuple[bool, bool, int]:
    limit = judgment.detection_limit
    return (judgment.reason is not None, limit is None, 0 if limit is None else limit.bytes)


def stated_limit(judged: Mapping[str, Judged], *, steps: int, seconds: float | None) -> str | None:
    """Return how small a leak would have been detected, and in how long a run; None if nothing was judged.

    Args:
        judged: what the judgment of growth is based on, by device.
        steps: optimizer steps of the run.
        seconds: how long it was watched; None if unknown.
    """
    devices: dict[str, list[str]] = {}
    for device, judgment in judged.items():
        if judgment.detection_limit is not None:
            limit = rate(judgment.detection_limit.bytes, judgment.detection_limit.per)
            devices.setdefault(limit, []).append(device)
    if not devices:
        return None
    limits = " and ".join(f"{limit} on {devices_in_words(names)}" for limit, names in devices.items())
    first = next(judgment for judgment in judged.values() if judgment.detection_limit is not None)
    if first.scale == "step":
        rests_on = count(steps, "step")
    elif first.scale == "microbatch":
        rests_on = count(first.points, "backward")
    else:
        rests_on = count(first.points, "reading") if seconds is None else duration(seconds)
    return f"no growth above {limits} in {rests_on}"
