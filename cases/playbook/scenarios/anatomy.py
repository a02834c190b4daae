"""M1: bytes per parameter, predicted, and measured by the ledger."""

from __future__ import annotations

import re
from functools import partial

from row import Row
from tools import job, python, together

PARTS = ("parameter", "gradient", "optimizer state")
WORKSPACE = "cuBLAS workspace"
CLASSIC = 18
PURE = 8
TOLERANCE = 0.5


def m1(device: str) -> Row:
    """The classic 18 bytes per parameter, and the 8 of pure bf16."""
    found, pure, told, told_pure = together(
        *(
            partial(job, "anatomy.py", "--device", device, *more)
            for more in ((), ("--cured",), ("--predict",), ("--predict", "--cured"))
        )
    )
    count = found["parameters"]
    each = {part: found["owners"].get(part, 0) / count for part in PARTS}
    total = sum(each.values())
    after = sum(pure["owners"].get(part, 0) for part in PARTS) / count
    book = " ".join(python("-m", "memtriage", "explain", "M1").stdout.split())
    claim = re.search(r"training takes (\d+) B per parameter[\w ]*", book)
    effect = f"{total:.2f} → {after:.2f} B/param (table of the playbook: {CLASSIC} → {PURE})"
    if device == "cuda":
        blocks = [(each["allocated"] - each["owners"][WORKSPACE]) / count for each in (found, pure)]
        effect += f"; allocated, with rounding: {blocks[0]:.2f} → {blocks[1]:.2f}"
    names = ", ".join(f"{part} {value:.2f}" for part, value in each.items())
    return Row(
        entry="M1",
        symptom=f"{count / 1e6:.1f} M parameters of 2 bytes take {total:.2f} B each at rest, and not 2",
        said=f"`memtriage.ledger()`, bytes per parameter by owner: {names}; `memtriage explain M1`: "
        + (claim[0] if claim else book),
        fix="weights, gradients and states in bf16",
        effect=effect,
        predicted=f"{told['end'] / count:.2f} → {told_pure['end'] / count:.2f} B/param",
        figures={"as_it_was": found, "pure": pure, "predicted": [told, told_pure]},
        named=claim is not None and abs(total - int(claim[1])) < TOLERANCE,
    )
