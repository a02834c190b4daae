"""What a watch notes of host memory, and that it becomes findings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memtriage.account.census import CensusView
from memtriage.account.host_reading import HostReading
from memtriage.diagnose.host.findings import host_findings
from memtriage.observe.cgroup import CgroupMemory
from memtriage.observe.counters import Reading
from memtriage.observe.host import ChildSample, HostSample, ShmUse, memory_classes
from memtriage.observe.malloc import malloc_info
from memtriage.session import host_watch
from memtriage.session.host_watch import HostWatch
from memtriage.treat.host_tuning import MALLOC_SETTINGS

MIB = 1 << 20
GIB = 1 << 30
OWN = HostSample(rss=GIB, pss=GIB, swap=3 * MIB, peak_rss=2 * GIB)
NO_GRAPH = cast(CensusView, None)  # only looked at where there are child processes, or a reading
needs_kernel = pytest.mark.skipif(
    malloc_info() is None or memory_classes() is None, reason="no glibc counters, or no smaps"
)


def child(pid: int, uss: int, shared: int, swap: int = 0) -> ChildSample:
    return ChildSample(
        pid=pid, name="pt_data_worker", rss=GIB, pss=GIB, uss=uss, shared_anon=shared, swap=swap
    )


def sampled(watch: HostWatch, *below: ChildSample, group: CgroupMemory | None = None) -> None:
    watch.at_sample(OWN, list(below), group, 100 * GIB)


def test_pages_that_became_a_workers_own_were_copied() -> None:
    watch = HostWatch()
    sampled(watch, child(1, uss=10 * MIB, shared=400 * MIB), child(2, uss=10 * MIB, shared=400 * MIB))
    sampled(watch, child(1, uss=180 * MIB, shared=230 * MIB), child(2, uss=300 * MIB, shared=395 * MIB))
    copied = {growth.pid: growth.copied for growth in watch.conclude().workers}
    assert copied == {1: 170 * MIB, 2: 5 * MIB}, "the second allocated 290 MiB: that is no copying"


def test_mapped_files_are_compared_with_the_first_reading() -> None:
    watch, resident = HostWatch(), [0]
    classes = SimpleNamespace(resident=lambda kind: resident[0] if kind == "file" else -1)
    reading = cast(HostReading, SimpleNamespace(classes=classes, pinned=None))
    view = cast(CensusView, SimpleNamespace(census=lambda: SimpleNamespace(storages=[]), graph=None))
    for nbytes in (3 * MIB, 5 * MIB, 4 * MIB):
        resident[0] = nbytes
        watch.at_census(view, reading)
    assert (watch.evidence.mapped_files_first, watch.evidence.mapped_files) == (3 * MIB, 4 * MIB)


def test_a_worker_that_ended_is_remembered() -> None:
    watch = HostWatch()
    sampled(watch, child(1, uss=0, shared=400 * MIB))
    sampled(watch, child(1, uss=200 * MIB, shared=200 * MIB))
    sampled(watch)
    assert [growth.copied for growth in watch.conclude().workers] == [200 * MIB]


def test_the_highest_pressure_and_swap_are_kept() -> None:
    watch = HostWatch()
    for usage, swap in ((7 * GIB, 9 * MIB), (5 * GIB, 0)):
        group = CgroupMemory(version=2, path="/g", limit=8 * GIB, usage=usage, inactive_file=GIB)
        sampled(watch, child(1, 0, 0, swap=swap), group=group)
    evidence = watch.conclude()
    assert evidence.pressure is not None
    assert (evidence.pressure.usage, evidence.pressure.job) == (6 * GIB, 2 * GIB)
    assert evidence.swapped == 12 * MIB
    assert evidence.peak_rss == 2 * GIB


def test_a_peak_from_before_the_watch_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_watch, "host_peak", lambda: 2 * GIB)
    watch = HostWatch()
    sampled(watch)
    assert watch.evidence.peak_rss is None
    for peak in (3 * GIB, GIB):  # a new one, and what is left after the mark was reset
        watch.at_sample(HostSample(rss=GIB, pss=GIB, peak_rss=peak), [], None, 9 * GIB)
    assert watch.evidence.peak_rss == 3 * GIB


def test_without_a_limit_there_is_no_pressure() -> None:
    watch = HostWatch()
    sampled(watch, group=CgroupMemory(version=2, path="/g", usage=7 * GIB))
    sampled(watch)
    assert watch.conclude().pressure is None


def test_shared_memory_is_counted_from_the_start_of_the_watch() -> None:
    watch = HostWatch()
    for used in (10 * MIB, 60 * MIB, 20 * MIB):
        watch.at_shared_memory(ShmUse(total=64 * MIB, used=used))
    watch.at_shared_memory(None)
    use = watch.conclude().shared_memory
    assert use is not None and (use.used, use.total, use.grown) == (60 * MIB, 64 * MIB, 50 * MIB)


def test_little_kept_by_malloc_costs_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_watch, "read_host", lambda: pytest.fail("read the address space for nothing"))
    monkeypatch.setattr(host_watch, "malloc_info", lambda: pytest.fail("read malloc for nothing"))
    watch = HostWatch()
    watch.at_mark([Reading("cuda:0", 1, 2), Reading("cpu", 900 * MIB, GIB)], 2 * GIB, 3)
    watch.at_mark([Reading("cpu")], 2 * GIB, 4)
    watch.at_mark([], None, 5)
    watch.while_training()
    assert watch.conclude().retention is None


@needs_kernel
def test_what_went_back_is_not_held_against_malloc() -> None:
    watch = HostWatch()
    watch.at_mark([Reading("cpu", 100 * MIB, 900 * MIB)], GIB, 3)
    watch.while_training()
    assert watch.evidence.retention is not None and watch.evidence.retention.step == 3
    assert watch.evidence.taken_by_steps is not None
    watch.at_mark([Reading("cpu", 100 * MIB, 120 * MIB)], GIB, 4)
    assert host_findings(watch.conclude()) == []
    assert watch.evidence.retention is None


def test_a_slow_malloc_is_not_read_at_every_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    now, readings = [0.0], []

    def slow() -> SimpleNamespace:
        now[0] += 0.05
        readings.append(int(now[0] * 1000))
        return SimpleNamespace(in_use=readings[-1])

    monkeypatch.setattr(host_watch.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(host_watch, "malloc_info", slow)
    monkeypatch.setattr(host_watch, "read_host", lambda: None)
    watch = HostWatch()
    watch.at_mark([Reading("cpu", 100 * MIB, 900 * MIB)], GIB, 3)
    for _ in range(3000):
        now[0] += 0.01
        watch.while_training()
    assert 3 <= len(readings) <= 5, "one at the mark, the others 10 s apart"
    assert watch.evidence.taken_by_steps == readings[-1] - readings[0]


def test_what_a_step_takes_is_counted_from_the_last_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_use = [100 * MIB]
    monkeypatch.setattr(host_watch, "malloc_info", lambda: SimpleNamespace(in_use=in_use[0]))
    monkeypatch.setattr(host_watch, "read_host", lambda: None)
    monkeypatch.setattr(host_watch, "_READING_SHARE", 1e9)  # every reading is due
    watch = HostWatch()
    watch.at_mark([Reading("cpu", 100 * MIB, 900 * MIB)], GIB, 3)
    in_use[0] += 50 * MIB
    watch.while_training()
    watch.at_mark([Reading("cpu", 150 * MIB, 900 * MIB)], GIB, 4)  # the program keeps what it took
    in_use[0] += 30 * MIB
    watch.while_training()
    assert watch.evidence.taken_by_steps == 50 * MIB
    watch.at_census(NO_GRAPH, None)
    in_use[0] += 70 * MIB  # what the watch keeps of its census
    watch.while_training()
    assert watch.evidence.taken_by_steps == 50 * MIB


@needs_kernel
def test_what_the_program_took_since_is_not_held_against_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = HostWatch()
    watch.at_mark([Reading("cpu", 100 * MIB, 900 * MIB)], GIB, 3)
    kept = watch.evidence.retention
    assert kept is not None
    watch.evidence.retention = replace(kept, resident=800 * MIB, trimmable=790 * MIB)
    watch.at_mark([Reading("cpu", 500 * MIB, 900 * MIB)], GIB, 4)
    watch.evidence.retention = replace(kept, resident=800 * MIB, trimmable=790 * MIB)
    kept = watch.conclude().retention
    assert kept is not None and (kept.resident, kept.trimmable) == (400 * MIB, 400 * MIB)


LOADING = """
import torch

def load():
    shards = [torch.ones(100 * 1024) for _ in range(1200)]
    return shards[-1]

kept = load()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
"""


def watched(script: Path, *options: str) -> dict[str, Any]:
    """The report of a watched run."""
    result = script.with_suffix(".json")
    command = [sys.executable, "-m", "memtriage", "run", *options, "--json", str(result), str(script)]
    plain = {name: value for name, value in os.environ.items() if name not in MALLOC_SETTINGS}
    subprocess.run(command, cwd=script.parent, env=plain, capture_output=True, check=True)
    report: dict[str, Any] = json.loads(result.read_text())
    return report


@needs_kernel
def test_malloc_retention_is_found_and_cured_by_tuning(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOADING)
    report = watched(script)
    by_time = any(counter["scale"] == "time" for counter in report["judged"].values())  # a slow machine
    assert report["verdict"] in ({"clean", "not_judged"} if by_time else {"not_judged"})  # four steps
    (finding,) = report["findings"]
    assert finding["kind"] == "malloc_retention"
    assert 400 * MIB < finding["bytes"] < 520 * MIB
    tuned = watched(script, "--host-tuning")
    assert tuned["findings"] == []
