"""What memtriage says of a rung's program before it runs, without a GPU: `estimate.py M7` prints JSON.

`memtriage.plan` is asked for the cheapest changes that fit the rung's budget, and `memtriage.predict` for the
program with the playbook's change.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from programs import RUNGS, Rung

import memtriage

STAND_INS = {"8-bit optimizer", "offloaded optimizer"}
"""Changes that `memtriage plan` simulates by an optimizer with the same states on the device."""


def estimate(rung: Rung, version: str | None) -> dict[str, Any]:
    """The plan for the program as it is, and the peaks of the changed one. Sizes are bytes."""
    plan = memtriage.plan(
        rung.build(changed=False), rung.budget, world_size=rung.ranks, allow=rung.allow, torch_version=version
    )
    figures: dict[str, Any] = {
        "budget": plan.budget,
        "fits": plan.fits,
        "before": _peak(plan.before),
        "planned": _peak(plan.after),
        "steps": [
            {"playbook": step.playbook, "rung": step.rung, "action": step.action, "saves": step.saves,
             "slowdown": step.slowdown, "speed": step.speed, "maths": step.maths}
            for step in plan.steps
        ],
        "seconds": plan.seconds,
    }  # fmt: skip
    if STAND_INS.intersection(rung.changes):
        figures["untraced"] = "its kernels or its host memory are real: the plan's stand-in counts"
        return figures
    try:
        changed = memtriage.predict(
            rung.build(changed=True), allocator_conf=rung.conf, world_size=rung.ranks, torch_version=version
        )
    except (ValueError, ImportError) as error:  # a library that cannot be traced, or is not there
        figures["untraced"] = str(error)
    else:
        figures["changed"] = {"allocated": changed.peak_allocated, "reserved": changed.peak_reserved}
    return figures


def _peak(peak: Any) -> dict[str, Any]:
    return {
        "allocated": peak.allocated,
        "reserved": peak.reserved,
        "needs": peak.needs,
        "phase": peak.phase,
    }


if __name__ == "__main__":
    print(json.dumps(estimate(RUNGS[sys.argv[1]], sys.argv[2] if len(sys.argv) > 2 else None)))
