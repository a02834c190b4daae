"""The verdict on a run in one word, and why growth could not be judged. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from memtriage.model.findings import DEVICE_HOST, GROWING, TRAITS, Finding, Verdict
from memtriage.model.judged import Judged
from memtriage.model.units import devices_in_words, is_process, processes_in_words, rate, size

_IN_ORDER: Final[tuple[Verdict, ...]] = ("leak", "residue", "fragmentation")
_SETTLES: Final = "run longer to confirm"
_UNEXPLAINED: Final = f"memory grows, and no holder of it was found; {_SETTLES}"


def verdict(findings: Iterable[Finding], died_of_memory: bool, judged: Mapping[str, Judged]) -> Verdict:
    """Return the verdict: the first that applies of out_of_memory, leak, residue, fragmentation, clean.

    With a suspicion, or a counter that could not be judged, a run is not clean: if no other verdict applies,
    it is `not_judged`. Findings of other kinds do not change the verdict. Whether a process was killed, or
    memtriage itself failed, cannot be seen here.

    Args:
        findings: of all devices and ranks. Growth without a certainty is of an older record, and was proven.
        died_of_memory: whether the script ended because memory ran out.
        judged: what the judgment of growth is based on, by device.
    """
    if died_of_memory:
        return "out_of_memory"
    certain, suspected = set(), False
    for finding in findings:
        if _is_suspected(finding):
            suspected = True
        else:
            certain.add(TRAITS[finding.kind].verdict)
    for word in _IN_ORDER:
        if word in certain:
            return word
    followed = [counter for counter in judged.values() if counter.scale is not None]
    flat = all(counter.detection_limit is not None for counter in followed)
    return "clean" if followed and flat and not suspected else "not_judged"


def reasons_not_judged(findings: Iterable[Finding], judged: Mapping[str, Judged]) -> list[str]:
    """Return why a run is not judged, one line per reason, suspicions first; empty if no reason is known.

    Args:
        findings: those of the run.
        judged: what the judgment of growth is based on, by device.
    """
    open_ones = [finding for finding in findings if _is_suspected(finding)]
    suspected = dict.fromkeys(_suspicion(finding) for finding in open_ones)
    # malloc's counter, by which the CPU is judged, is also the host's
    suspected_devices = {
        "cpu" if finding.device == DEVICE_HOST else finding.device
        for finding in open_ones
        if finding.process is None
    }
    processes_grow = any(finding.process is not None for finding in open_ones)
    reasons: dict[str, list[str]] = {}
    for device, judgment in judged.items():
        process = is_process(device)
        if device in suspected_devices or (process and (judgment.scale is None or processes_grow)):
            continue
        if judgment.reason is not None:
            reasons.setdefault(judgment.reason, []).append(device)
        elif judgment.scale is not None and judgment.detection_limit is None:
            reasons.setdefault(_UNEXPLAINED, []).append(device)
    if len(judged) > 1:
        lines = [f"{_in_words(devices)}: {why}" for why, devices in reasons.items()]
    else:
        lines = list(reasons)
    return [*suspected, *lines]


def _is_suspected(finding: Finding) -> bool:
    return finding.kind in GROWING and finding.certainty == "suspected"


def _suspicion(finding: Finding) -> str:
    per = next(iter(finding.rates), None)
    amount = size(finding.bytes) if per is None else rate(finding.rates[per], per)
    place = f"on {finding.device}" if finding.process is None else f"in {finding.process}"
    return f"suspected growth of {amount} {place}; {_SETTLES}"


def _in_words(names: Sequence[str]) -> str:
    devices = [name for name in names if not is_process(name)]
    processes = [name for name in names if is_process(name)]
    words = [devices_in_words(devices)] if devices else []
    return ", ".join([*words, *([f"{processes_in_words(processes)} not judged"] if processes else [])])


def weakest(judged: Iterable[Judged]) -> Judged:
    """Return the judgment that proves least: one with a reason, then growth, then the highest limit.

    Args:
        judged: of the same device on several ranks, at least one.
    """
    return max(judged, key=_weakness)


def _weakness(judgment: Judged) -> tuple[bool, bool, int]:
    limit = judgment.detection_limit
    return (judgment.reason is not None, limit is None, 0 if limit is None else limit.bytes)
