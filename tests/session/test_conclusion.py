"""The end of a watch: which findings come in which order, and what is written of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memtriage.diagnose.growth.facts import JudgedDevice, Leak
from memtriage.diagnose.growth.judgment import Judgment
from memtriage.diagnose.host.evidence import HostEvidence, Retention
from memtriage.model.blocks import DeviceCounters
from memtriage.model.findings import Finding
from memtriage.model.judged import DetectionLimit
from memtriage.model.position import TrainingPosition
from memtriage.observe import cuda
from memtriage.report.growth_words import findings_of, judged_in_words
from memtriage.session.conclusion import Conclusion
from memtriage.session.record import SessionRecord
from support.judged import a_leak

GIB = 1 << 30
FLAT = JudgedDevice(scale="step", points=30, limit=DetectionLimit(1024, "step"))
SHORT = JudgedDevice(scale="step", points=2, obstacle="few")


def finding(kind: Any, nbytes: int = 1, **given: Any) -> Finding:
    return Finding(kind=kind, device="cpu", bytes=nbytes, **given)


def judgment(*leaks: Leak, cpu: JudgedDevice = FLAT) -> Judgment:
    return Judgment(leaks=list(leaks), judged={"cpu": cpu})


class Watched:
    """What the parts of a watch have gathered, and its conclusion.

    Attributes:
        parts: what each answers; an exception is raised.
        published: leaks that the live state got.
        known: findings that the death was judged with.
    """

    def __init__(self, folder: Path, **parts: Any) -> None:
        self.parts: dict[str, Any] = {
            "growth": judgment(), "residue": [], "fragmentation": [], "batches": [],
            "host": HostEvidence(), "death": finding("out_of_memory"), **parts,
        }  # fmt: skip
        self.published: list[Finding] = []
        self.known: list[Finding] = []
        self.path = folder / "rank.jsonl"
        self.record = SessionRecord(self.path)
        self.record.__enter__()
        progress: Any = SimpleNamespace(position=TrainingPosition(step=7), elapsed=lambda: 12.3456)
        self.conclusion = Conclusion(
            3, progress, self.record, SimpleNamespace(leaks=self.published.extend),  # type: ignore[arg-type]
            growth=SimpleNamespace(  # type: ignore[arg-type]
                judged=lambda: self.answer("growth"),
                write_readings=lambda last: self.record.note(f"readings, {last=}"),
                limits={"cpu": 9 * GIB}, transient=SimpleNamespace(most=lambda: {"cpu": GIB}),
            ),
            fragmentation=SimpleNamespace(findings=lambda: self.answer("fragmentation")),  # type: ignore[arg-type]
            host=SimpleNamespace(conclude=lambda: self.answer("host")),  # type: ignore[arg-type]
            batches=SimpleNamespace(findings=lambda position: self.answer("batches")),  # type: ignore[arg-type]
            death=SimpleNamespace(finding=self._death),  # type: ignore[arg-type]
            residue=SimpleNamespace(findings=lambda: self.answer("residue")),  # type: ignore[arg-type]
        )  # fmt: skip

    def answer(self, part: str) -> Any:
        answer = self.parts[part]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _death(self, error: BaseException, known: list[Finding]) -> Finding:
        self.known = list(known)
        death: Finding = self.answer("death")
        return death


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Any]:
    made: list[Watched] = []

    def begin(**parts: Any) -> Watched:
        made.append(Watched(tmp_path, **parts))
        return made[-1]

    yield begin
    for each in made:
        each.record.close()


RETAINED = HostEvidence(retention=Retention(step=5, resident=GIB, trimmable=GIB, arenas=2, rss=2 * GIB))


def test_findings_come_in_the_order_of_their_parts(watched: Any) -> None:
    leak = a_leak(rate=100, nbytes=1)
    run = watched(
        growth=judgment(leak), residue=[finding("residue")], fragmentation=[finding("fragmentation")],
        host=RETAINED, batches=[finding("fragmentation", 2)],
    )  # fmt: skip
    run.conclusion.judge(None, None)
    assert [(each.kind, each.bytes) for each in run.conclusion.findings] == [
        ("leak", 1), ("residue", 1), ("fragmentation", 1), ("malloc_retention", GIB), ("fragmentation", 2),
    ]  # fmt: skip
    retention = run.conclusion.findings[3]
    assert (retention.rank, retention.step) == (3, 5)
    assert run.published == findings_of([leak], rank=3)
    assert (run.conclusion.verdict, run.conclusion.exception_text) == ("leak", None)
    assert run.conclusion.judged == judged_in_words({"cpu": FLAT})


def test_death_by_memory_comes_first_and_is_judged_with_all_others(watched: Any) -> None:
    error = MemoryError("no more")
    run = watched(residue=[finding("residue")], batches=[finding("fragmentation")])
    run.conclusion.judge(error, error)
    assert [(each.kind, each.rank) for each in run.conclusion.findings] == [
        ("out_of_memory", 3),
        ("residue", None),
    ]
    assert [each.kind for each in run.known] == ["residue"]
    assert (run.conclusion.verdict, run.conclusion.died_of_memory) == ("out_of_memory", True)
    assert run.conclusion.exception_text == "MemoryError: no more"


@pytest.mark.parametrize(
    ("by_itself", "reason"),
    [
        (False, "2 steps are too few, 12 are needed"),
        (True, "the script failed after 7 steps: 2 steps are too few, 12 are needed"),
    ],
)
def test_a_run_that_failed_was_too_short_for_that(watched: Any, by_itself: bool, reason: str) -> None:
    run = watched(growth=judgment(cpu=SHORT))
    run.conclusion.judge(None, None, by_itself)
    assert run.conclusion.judged["cpu"].reason == reason
    assert run.conclusion.verdict == "not_judged"


@pytest.mark.parametrize("part", ["growth", "fragmentation", "host", "batches"])
def test_a_judgment_that_fails_leaves_the_others(watched: Any, part: str) -> None:
    run = watched(residue=[finding("residue")], **{part: RuntimeError("its own")})
    assert run.conclusion.verdict == "error"  # before it was judged
    run.conclusion.judge(None, None)
    assert [each.kind for each in run.conclusion.findings] == ["residue"]
    assert run.conclusion.verdict == "residue"
    assert "RuntimeError: its own" in run.path.read_text()


def test_a_run_whose_growth_could_not_be_judged_is_an_error(watched: Any) -> None:
    failed, short = watched(growth=RuntimeError("its own")), watched(growth=judgment(cpu=SHORT))
    for run in (failed, short):
        run.conclusion.judge(None, None)
    assert (failed.conclusion.verdict, short.conclusion.verdict) == ("error", "not_judged")


def test_the_end_is_written_with_its_findings(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = DeviceCounters(peak_allocated=5, peak_reserved=9)
    monkeypatch.setattr(cuda, "counters", lambda device: counters)
    run = watched(residue=[finding("residue")])
    run.conclusion.judge(ValueError("no data"), None)
    run.conclusion.write(1, ["cpu", "cuda:0"])
    run.record.close()
    *_, evidence, found, end = (json.loads(line) for line in run.path.read_text().splitlines())
    assert evidence["text"] == "readings, last=True"
    assert (found["kind"], found["final"]) == ("residue", True)
    assert end["peak_rss"] > 0
    wanted = {
        "verdict": "residue", "steps": 7, "exception": "ValueError: no data", "exit_code": 1,
        "time_s": 12.346, "device_limits": {"cpu": 9 * GIB}, "passing": {"cpu": GIB},
        "peak_allocated": {"cuda:0": 5}, "peak_reserved": {"cuda:0": 9},
    }  # fmt: skip
    assert {name: end[name] for name in wanted} == wanted
    assert end["judged"]["cpu"]["points"] == 30


def test_an_end_without_peaks_is_written_too(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(device: int) -> DeviceCounters:
        raise RuntimeError("no driver")

    monkeypatch.setattr(cuda, "counters", failing)
    run = watched()
    run.conclusion.judge(None, None)
    run.conclusion.write(None, ["cuda:0"])
    run.record.close()
    _, note, end = (json.loads(line) for line in run.path.read_text().splitlines())
    assert "(read peaks): RuntimeError: no driver" in note["text"]
    assert (end["verdict"], end.get("peak_reserved", {})) == ("clean", {})
