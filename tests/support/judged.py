"""Growth judged and put in words, as a report has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memtriage.diagnose.growth import judgment
from memtriage.diagnose.growth.attribution import Counter
from memtriage.diagnose.growth.estimate import Growth
from memtriage.diagnose.growth.evidence import Evidence
from memtriage.diagnose.growth.facts import Counted, Leak
from memtriage.diagnose.held import Held
from memtriage.model.census import GroupDetail
from memtriage.model.findings import Finding
from memtriage.model.judged import Judged
from memtriage.model.paths import HolderPath, anchor_of
from memtriage.report.growth_words import findings_of, judged_in_words


@dataclass(frozen=True)
class InWords:
    findings: list[Finding]
    judged: dict[str, Judged]
    counters: Mapping[str, Counter]


def judge(evidence: Evidence, *, limits: bool = True) -> InWords:
    found = judgment.judge(evidence, limits=limits)
    return InWords(findings_of(found.leaks), judged_in_words(found.judged), evidence.main.counters)


def a_holder(path: HolderPath, **facts: Any) -> Held:
    """A holder of tensors without a graph; facts of a closer look are given like the others."""
    of_detail = {name: facts.pop(name) for name in GroupDetail.__struct_fields__ if name in facts}
    known = {"anchor": path, "attached": False, "owner": "variable", **facts}
    return Held(path, detail=GroupDetail(**of_detail), **known)


def a_leak(path: HolderPath | None = None, rate: int | None = None, **facts: object) -> Leak:
    """A leak that a counter shows, of so many bytes per step."""
    anchor = () if path is None else anchor_of(path)
    counter = Counted("cpu", Growth("growing"), 0)
    known: dict[str, object] = {
        "device": "cpu", "scale": "step", "certainty": "proven", "nbytes": 10 * (rate or 0), "path": path,
        "rates": {} if rate is None else {"step": rate}, "shown_by": counter,
        "cause": "native code" if path is None else a_holder(path, anchor=anchor, attached=path != anchor),
    }  # fmt: skip
    return Leak(**{**known, **facts})  # type: ignore[arg-type]
