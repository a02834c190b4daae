"""M4 to M13: every rung's predicted saving and slow-down, and the measured ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from programs import RUNGS
from row import Row, before_after, times
from tools import last_json, lines_of, python

from memtriage.model.units import size

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def measured(entry: str, device: str) -> dict[str, Any]:
    """The figures of both programs of a rung."""
    arguments = ["measure.py", entry, *(("--tiny",) if device == "cpu" else ())]
    if not RUNGS[entry].conf:
        return last_json(python(*arguments))
    before = last_json(python(*arguments, "--only", "before"))
    return before | last_json(python(*arguments, "--only", "after", environment=EXPANDABLE))


def estimated(entry: str) -> dict[str, Any]:
    """What memtriage says beforehand."""
    return last_json(python("estimate.py", entry))


class Beforehand:
    """Estimates that are under way for all rungs, and what one process has measured of them."""

    def __init__(self) -> None:
        self.estimates: dict[str, Future[dict[str, Any]]] = {}
        self.figures: dict[str, dict[str, Any]] = {}

    def begin(self, entries: list[str], pool: ThreadPoolExecutor) -> None:
        """Starts the estimates."""
        for entry in entries:
            self.estimates[entry] = pool.submit(estimated, entry)

    def measure(self, entries: list[str], device: str) -> Iterator[str]:
        """Measures one after the other in one process, and yields each entry when its turn has passed.

        Last come those that need a process of their own, or are not measured at all.
        """
        alone = [
            entry
            for entry in entries
            if RUNGS[entry].conf or (device == "cpu" and RUNGS[entry].absent_on_cpu)
        ]
        shared = [entry for entry in entries if entry not in alone]
        arguments = ["measure.py", *shared, *(("--tiny",) if device == "cpu" else ())]
        # M10 steps on the host. Either of these two holds torch to the fewer threads.
        cores = "1" if device == "cpu" else str(len(os.sched_getaffinity(0)))
        threads = {"OMP_NUM_THREADS": cores, "MKL_NUM_THREADS": cores}
        for line in lines_of(*arguments, environment=threads) if shared else ():
            if line.startswith("{"):
                report = json.loads(line)
                self.figures[report["entry"]] = report
                yield report["entry"]
        for entry in shared:
            if entry not in self.figures:
                self.figures[entry] = {"before": {"error": "the process that measures died before it"}}
                yield entry
        yield from alone


BEFOREHAND = Beforehand()


def rung_row(entry: str, device: str) -> Row:
    """A row of the ladder."""
    rung = RUNGS[entry]
    estimate = BEFOREHAND.estimates[entry].result() if entry in BEFOREHAND.estimates else estimated(entry)
    row = Row(
        entry=entry,
        symptom=f"needs {size(estimate['before']['needs'])} where {size(estimate['budget'])} are the budget",
        said=_said(estimate),
        fix=", ".join(rung.changes),
        effect="",
        predicted=_predicted(entry, estimate),
        figures={"estimate": estimate},
        named=_names(entry, estimate["steps"]),
    )
    if device == "cpu" and rung.absent_on_cpu:
        row.absent = row.effect = f"not measured on a CPU: {rung.absent_on_cpu}"
        return row
    figures = BEFOREHAND.figures.get(entry) or measured(entry, device)
    row.figures["measured"] = figures
    for which in ("before", "after"):
        if "error" in figures[which]:
            row.absent = row.effect = f"not measured: {figures[which]['error']}"
            return row
    before, after = figures["before"], figures["after"]
    pace = times(before["step_s"], after["step_s"])
    if device == "cpu":
        row.effect = f"{before_after(before['resident'], after['resident'])} resident, a small model; {pace}"
    elif rung.conf:
        row.effect = f"{before_after(before['reserved'], after['reserved'])} reserved; {pace}"
    else:
        row.effect = f"{before_after(before['allocated'], after['allocated'])}; {pace}"
        if rung.ranks > 1:
            row.effect += "; one rank whose group communicates nothing"
    return row


def _names(entry: str, steps: list[dict[str, Any]]) -> bool:
    """Whether the plan is of this entry; M4 is the ladder itself, so a plan of several rungs."""
    return len(steps) > 1 if entry == "M4" else [step["playbook"] for step in steps] == [entry]


def _said(estimate: dict[str, Any]) -> str:
    steps = [
        f"{step['playbook']}: {step['action']}, saves {size(step['saves'])}" for step in estimate["steps"]
    ]
    return "`memtriage plan`: " + "; ".join(steps) + ("" if estimate["fits"] else "; does not fit")


def _predicted(entry: str, estimate: dict[str, Any]) -> str:
    what = "reserved" if RUNGS[entry].conf else "allocated"
    after = estimate.get("changed", estimate["planned"])[what]
    text = f"{before_after(estimate['before'][what], after)}"
    slower = [step["slowdown"] for step in estimate["steps"] if step["slowdown"] is not None]
    return text + "".join(f"; {share:+.0%} operations" for share in slower)


SCENARIOS: dict[str, Callable[[str], Row]] = {entry: partial(rung_row, entry) for entry in RUNGS}
