"""M18 to M21: statistics, the snapshot, what is no cure and no leak, and a leak."""

from __future__ import annotations

import re
import tempfile
from functools import partial
from pathlib import Path

from row import Row, before_after, finding_text
from tools import HERE, PLAIN_MALLOC, error_line, explain, job, memtriage, python, together, watched

from memtriage.model.units import size

BARE = "torch.AcceleratorError: CUDA error: out of memory"
"""What a failing driver call says: the text has no sizes."""
RECORDED = HERE.parent.parent / "tests" / "data" / "snapshots" / "fp8_residue.pickle.gz"
LONGER = ("--steps", "24")
SHORT = 14
"""Steps after which memtriage projects the end."""


def m18(device: str) -> Row:
    """The peak of step 1 is not that of training; a bare error has no figures at all."""
    text = BARE
    if device == "cuda":
        no_cache = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        text = error_line(python("jobs/reading.py", "--bare", environment=no_cache).stderr)
    diagnosis = explain(text)
    watch = next((fix for fix in diagnosis["fixes"] if fix["playbook"] == "M18"), None)
    figures = job("peaks.py", "--device", device)
    told = figures["predicted"]
    said = f"`memtriage explain` of {text!r}: `{diagnosis['diagnosis']}`"
    said += f"; M18: {watch['action']}" if watch else ""
    row = Row(
        entry="M18",
        symptom="a bare error without sizes; one figure after one step",
        said=said,
        fix="peaks by step, reset in between; the figure of the second step counts",
        effect="not measured: there is no GPU",
        predicted=f"step 1: {size(told[0])}, step 2: {size(told[1])}",
        figures={"explain": diagnosis, "job": figures, "text": text},
        named=watch is not None,
        absent="" if device == "cuda" else "the allocator's counters need a GPU",
    )
    if device == "cuda":
        peaks, reserved = figures["peaks"], figures["reserved"]
        row.symptom = f"{text!r}, no sizes; the peak of step 1 ({size(peaks[0])}) is not that of training"
        row.effect = (
            f"step 1: {size(peaks[0])}, step 2: {size(peaks[1])} (+{size(peaks[1] - peaks[0])}), step 3: "
            f"{size(peaks[2])}; reserved {size(reserved[2])}, allocated at rest {size(figures['allocated'])}"
        )
    return row


def m19(device: str) -> Row:
    """What stays after a model is gone, named by line from the allocator's history."""
    if device != "cuda":
        return _m19_recorded()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "as_it_was.pickle")
        left = job("snapshot.py", str(file))
        found = memtriage("snapshot", str(file))["devices"][0]
        cured = job("snapshot.py", str(Path(folder, "cured.pickle")), "--cured")
    finding = found["findings"][0]
    return Row(
        entry="M19",
        symptom=f"the model is deleted, and {size(left['allocated'])} stay allocated",
        said=f"`memtriage snapshot`: {finding_text(finding)}; {size(finding['bytes'])} allocated at "
        f"`{finding['allocated_at']}`",
        fix="the cache cleared with the model",
        effect=before_after(left["allocated"], cured["allocated"]),
        figures={"left": left, "finding": finding, "cured": cured},
        named=finding["playbook"] == "M19",
    )


def _m19_recorded() -> Row:
    device = memtriage("snapshot", str(RECORDED))["devices"][0]
    finding = next(finding for finding in device["findings"] if finding["playbook"] == "M19")
    return Row(
        entry="M19",
        symptom=f"{size(finding['bytes'])} stay after the model has gone (a snapshot recorded on an H200)",
        said=f"`memtriage snapshot`: {finding_text(finding)}; {size(finding['bytes'])} allocated at "
        f"`{finding['allocated_at']}`",
        fix="the caches cleared where training ends",
        effect="not run: there is no GPU",
        figures={"finding": finding},
        named=True,
        absent="the allocator's history needs a GPU",
    )


def m20(device: str) -> Row:
    """Reserved that rises and is no leak; `empty_cache()`."""
    flat = watched("leaks.py", "--device", device, "--flat", *LONGER, environment=PLAIN_MALLOC)
    key = "reserved" if device == "cuda" else "host_rss"
    rises = "reserved" if device == "cuda" else "the resident set"
    where = "cuda:0" if device == "cuda" else "cpu"
    marks = [mark[key] for mark in flat.report["marks"] if (mark["name"], mark["device"]) == ("step", where)]
    row = Row(
        entry="M20",
        symptom=f"{rises} rises: {size(min(marks))} → {size(max(marks))}",
        said=f"`{flat.report['verdict']}`",
        fix="none is needed",
        effect="not measured: there is no GPU",
        predicted="",
        figures={"rising": [min(marks), max(marks)], "verdicts": [flat.report["verdict"]]},
        named=flat.report["verdict"] == "clean",
        absent="" if device == "cuda" else "`empty_cache()` needs a GPU",
    )
    if device == "cuda":
        myth = job("myths.py")
        row.figures["empty_cache"] = myth
        before, after = myth["before"], myth["after"]
        row.effect = (
            f"`empty_cache()`: allocated {size(before[0])} → {size(after[0])}, reserved {size(before[1])} "
            f"→ {size(after[1])} (ledger: {size(myth['releasable'])} releasable); largest tensor that fits "
            f"{size(myth['largest_with_cache'])} → {size(myth['largest_without'])}"
        )
    return row


def m21(device: str) -> Row:
    """A leak and when it kills; the same program without it."""
    leak, truth, cured = together(
        *(
            partial(watched, "leaks.py", "--device", device, *arguments, environment=PLAIN_MALLOC)
            for arguments in (("--steps", str(SHORT)), (), ("--cured", *LONGER))
        )
    )
    finding = leak.finding("leak")
    told = next(
        (int(found[1].replace(",", "")) for sentence in finding["evidence"]
         if (found := re.search(r"full at step ([\d,]+)", sentence))), None
    )  # fmt: skip
    died = len(re.findall(r"^step \d+$", truth.stderr, re.MULTILINE)) + 1
    return Row(
        entry="M21",
        symptom=f"dies in step {died}",
        said=finding_text(finding, "full at step"),
        fix="`.detach()` what is kept",
        effect=f"dies in step {died} → `{cured.report['verdict']}`",
        predicted=f"full at step {told} (said after {SHORT} steps), died in step {died}",
        figures={"leak": finding, "projected": told, "died": died,
                 "verdicts": [leak.report["verdict"], truth.report["verdict"], cured.report["verdict"]]},
        named=finding["playbook"] == "M21",
    )  # fmt: skip
