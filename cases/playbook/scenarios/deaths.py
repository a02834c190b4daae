"""M14 to M17: the step at which it dies, as projected and in truth."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from row import Row, finding_text
from tools import PLAIN_MALLOC, Watched, job, together, watched

from memtriage.model.units import size

FIXES = {
    "M14": "the loss in 8 chunks, computed again in backward",
    "M15": "`torch.no_grad()`, and argmax kept instead of logits",
    "M16": "lengths capped to twice the usual",
    "M17": "weights, gradients and states in bf16",
}


def death(entry: str, device: str) -> Row:
    """Dies under its limit, at the projected step; cured, it does not."""
    arguments = (entry, "--device", device)
    told, told_cured, died, cured = together(
        lambda: job("dies.py", *arguments, "--predict"),
        lambda: job("dies.py", *arguments, "--predict", "--cured"),
        lambda: watched("dies.py", *arguments, environment=PLAIN_MALLOC),
        lambda: job("dies.py", *arguments, "--cured", environment=PLAIN_MALLOC),
    )
    finding = died.finding("out_of_memory")
    unit = "evaluation batch" if entry == "M15" else "step"
    at = reached(died, entry) + 1
    before, after = highest(told), highest(told_cured)
    peak = f", peak {size(cured['peak'])}" if cured.get("peak") else ""
    return Row(
        entry=entry,
        symptom=f"dies in {unit} {at} ({finding['phase']}), with {size(told['limit'])} allowed",
        said=finding_text(finding, "times)", "gradients were"),
        fix=FIXES[entry],
        effect=f"dies in {unit} {at} → runs{peak}",
        predicted=f"dies in {unit} {told['dies_at']}; {size(before)} → {size(after)} needed",
        figures={
            "finding": finding,
            "predicted": told,
            "predicted_cured": told_cured,
            "cured": cured,
            "at": at,
        },
        named=finding["playbook"] == entry,
    )


def reached(run: Watched, entry: str) -> int:
    """The last step, or batch of evaluation, that was completed."""
    word = "evaluated" if entry == "M15" else "step"
    done = re.findall(rf"^{word} (\d+)$", run.stderr, re.MULTILINE)
    return int(done[-1]) if done else 0


def highest(told: dict[str, object]) -> int:
    """The highest of the predicted peaks."""
    peaks = told["peaks"]
    flat = [peak for each in peaks.values() for peak in each] if isinstance(peaks, dict) else peaks
    return max(flat)


SCENARIOS: dict[str, Callable[[str], Row]] = {entry: partial(death, entry) for entry in FIXES}
