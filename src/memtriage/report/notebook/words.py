"""What reports of a notebook's cell say, as text or as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from memtriage.diagnose.ranks.merge import RunContext
from memtriage.diagnose.verdict import reasons_not_judged
from memtriage.model.cell import CellReport, DeviceUse, Freed, HolderChange
from memtriage.model.units import UNKNOWN, count, duration, signed, size
from memtriage.report.findings import FindingGroup, fold
from memtriage.report.run.words import VERDICTS, sentence
from memtriage.report.styles import Severity

_LEAST_TOLD: Final = 1024


def title(report: CellReport) -> str:
    """`In[5] · 4.2 s`."""
    return " · ".join(part for part in (report.label, duration(report.seconds)) if part)


def groups_of(report: CellReport) -> list[FindingGroup]:
    """Return the findings, as pages show them."""
    findings = [] if report.run_report is None else report.run_report.findings
    return fold(findings, [*report.runs_out_in, *[None] * (len(findings) - len(report.runs_out_in))])


def headline(report: CellReport) -> tuple[str, Severity, str]:
    """Return the verdict's word, how much it matters, and what stands behind it."""
    run = report.run_report
    if run is None:
        return "cell", "good", tensors_in_words(report)
    word, level = VERDICTS[run.verdict]
    groups = groups_of(report)
    if run.verdict == "clean":
        steps = f"no growth in {count(run.steps, 'step')}; " if run.steps else ""
        return word, level, steps + tensors_in_words(report)
    if run.verdict == "not_judged":
        why = reasons_not_judged(run.findings, run.judged) if run.steps else []
        return "cell", "good", "; ".join([*why, tensors_in_words(report)])
    return word, level, sentence(run, RunContext(), groups)


def tensors_in_words(report: CellReport) -> str:
    """`tensors +4.0 MiB on cpu`, for every device on which something changed."""
    changed = [use for use in report.devices if abs(use.after - use.before) >= _LEAST_TOLD]
    if not changed:
        return "tensors as before"
    return "tensors " + ", ".join(f"{signed(use.after - use.before)} on {use.device}" for use in changed)


def peak_in_words(use: DeviceUse) -> str:
    """Return the most that was in use, and of what."""
    if use.peak is None:
        return UNKNOWN
    return f"{size(use.peak)} resident" if use.device == "cpu" else f"{size(use.peak)} allocated"


def change_in_words(change: HolderChange) -> str:
    """`3 storages, parameter`."""
    number = count(abs(change.count), "storage") if change.count else "same storages"
    return f"{number}, {change.owner}"


def devices_in_words(nbytes: Mapping[str, int]) -> str:
    """`4.0 MiB on cuda:0, 1.0 KiB on cpu`, the largest first."""
    ordered = sorted(nbytes.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{size(number)} on {device}" for device, number in ordered)


def kept_by_ipython(traceback: Mapping[str, int], outputs: Mapping[str, int]) -> list[str]:
    """Return what the last traceback and `Out` keep, by device, and what releases it."""
    kept = []
    if traceback:
        kept.append(
            "the error's traceback keeps the variables of the functions that it ended: "
            f"{devices_in_words(traceback)}; `%memtriage_free` releases them"
        )
    if outputs:
        kept.append(
            f"`Out` alone keeps {devices_in_words(outputs)}: `%memtriage_free --out` empties it; a cell "
            "whose last line ends with `;` adds nothing"
        )
    return kept


def freed_in_words(freed: Freed) -> str:
    """Return what was released."""
    what = f"the traceback's variables ({count(freed.frames, 'function')})" if freed.frames else ""
    if not freed.bytes:
        return f"released {what}: no tensor was kept by that alone" if what else "no tensor was released"
    return f"freed {devices_in_words(freed.bytes)}" + (f": {what}" if what else "")
