"""Host findings: each needs its own evidence, and a healthy process has none."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.host.evidence import (
    HostEvidence,
    PinnedBlock,
    PinnedUse,
    Population,
    Pressure,
    Retention,
    SharedMemoryUse,
    WorkerGrowth,
)
from memtriage.diagnose.host.findings import (
    host_findings,
    host_notes,
    malloc_retention,
    pinned_rounding,
    rounding,
    shared_memory,
    worker_copy_on_write,
)
from memtriage.diagnose.host.findings import host_limit as host_limit_rule
from memtriage.diagnose.verdict import verdict
from memtriage.model.judged import DetectionLimit, Judged
from support.paths import named

FLAT = Judged(scale="step", points=30, detection_limit=DetectionLimit(1024, "step"))
MIB = 1 << 20
GIB = 1 << 30


def kept(resident: int, *, rss: int = GIB, trimmable: int | None = None) -> Retention:
    whole = resident if trimmable is None else trimmable
    return Retention(step=5, resident=resident, trimmable=whole, arenas=2, rss=rss)


def worker(copied: int, pid: int = 1) -> WorkerGrowth:
    return WorkerGrowth(pid, "pt_data_worker", copied, copied + 10 * MIB)


STRINGS = Population(named("train.names[*]"), "list", 2_000_000, 160 * MIB)


def test_a_process_of_which_nothing_is_known_has_no_findings() -> None:
    assert host_findings(HostEvidence()) == []
    assert host_notes(HostEvidence()) == []


def test_an_ordinary_training_process_has_no_findings() -> None:
    evidence = HostEvidence(
        highest_rss=GIB,
        peak_rss=GIB + 100 * MIB,
        mapped_files=10 * MIB,
        mapped_files_first=9 * MIB,
        retention=kept(150 * MIB),
        workers=[worker(68 * MIB), worker(68 * MIB, 2)],
        pinned=PinnedUse(
            (PinnedBlock(100 * MIB, named("a")), PinnedBlock(20 * MIB, named("b"))), 160 * MIB, "2.11.0"
        ),
        pressure=Pressure(usage=6 * GIB, limit=8 * GIB, available=100 * GIB, job=5 * GIB),
        shared_memory=SharedMemoryUse(used=20 * MIB, total=64 * MIB, grown=20 * MIB),
        swapped=2 * MIB,
    )
    assert host_findings(evidence) == []
    assert host_notes(evidence) == []


def test_no_host_finding_changes_the_verdict() -> None:
    evidence = HostEvidence(retention=kept(GIB, rss=2 * GIB), workers=[worker(400 * MIB)])
    findings = host_findings(evidence)
    assert [finding.kind for finding in findings] == ["malloc_retention", "worker_copy_on_write"]
    assert all(finding.device == "host" for finding in findings)
    assert verdict(findings, False, {"cpu": FLAT}) == "clean"


def test_retention_tells_what_a_trim_returns() -> None:
    finding = malloc_retention(HostEvidence(retention=kept(800 * MIB, trimmable=780 * MIB)))
    assert finding is not None
    assert (finding.bytes, finding.step) == (780 * MIB, 5)
    assert "malloc_trim" in str(finding.fix) and "780.0 MiB" in str(finding.fix)


def test_what_the_next_step_takes_again_is_not_retained() -> None:
    """Activations of 700 MiB are freed at the end of a step and allocated again in the next one."""
    evidence = HostEvidence(retention=kept(800 * MIB), taken_by_steps=700 * MIB)
    assert malloc_retention(evidence) is None
    evidence = HostEvidence(retention=kept(800 * MIB), taken_by_steps=200 * MIB)
    finding = malloc_retention(evidence)
    assert finding is not None and finding.bytes == 600 * MIB
    assert "steps reuse 200.0 MiB of it" in finding.evidence[0]


def test_retention_is_measured_against_the_process() -> None:
    assert malloc_retention(HostEvidence(retention=kept(GIB, rss=100 * GIB))) is None
    assert malloc_retention(HostEvidence(retention=kept(30 * GIB, rss=100 * GIB))) is not None


def test_workers_that_copy_a_list_of_objects() -> None:
    evidence = HostEvidence(workers=[worker(170 * MIB), worker(160 * MIB, 2), worker(MIB, 3)])
    assert worker_copy_on_write(evidence) is None, "a garbage collection alone does as much"
    evidence.population = STRINGS
    finding = worker_copy_on_write(evidence)
    assert finding is not None
    assert (finding.bytes, finding.holder) == (330 * MIB, "train.names[*]")
    assert "160.0 MiB to 170.0 MiB each" in finding.evidence[0]
    assert "2,000,000 entries" in finding.evidence[1]


def test_workers_that_copy_very_much_need_no_named_container() -> None:
    finding = worker_copy_on_write(HostEvidence(workers=[worker(500 * MIB)]))
    assert finding is not None and finding.holder is None


def test_a_small_container_explains_nothing() -> None:
    small = Population(named("train.index[*]"), "list", 20_000, MIB)
    assert worker_copy_on_write(HostEvidence(workers=[worker(100 * MIB)], population=small)) is None


def test_shared_memory_nearly_full() -> None:
    full = HostEvidence(shared_memory=SharedMemoryUse(used=60 * MIB, total=64 * MIB, grown=58 * MIB))
    finding = shared_memory(full)
    assert finding is not None and "--shm-size" in str(finding.fix) and "94 %" in finding.evidence[0]


def test_shared_memory_that_others_filled_is_no_finding() -> None:
    others = HostEvidence(shared_memory=SharedMemoryUse(used=60 * MIB, total=64 * MIB, grown=MIB))
    assert shared_memory(others) is None


def test_cgroup_limit_is_nearer_than_free_memory() -> None:
    near = Pressure(usage=15 * GIB, limit=16 * GIB, available=900 * GIB, job=14 * GIB)
    finding = host_limit_rule(HostEvidence(pressure=near))
    assert finding is not None and finding.bytes == 14 * GIB
    assert "900.0 GiB" in finding.evidence[0] and "1.0 GiB were left" in finding.evidence[0]


def test_a_control_group_that_others_fill_is_no_finding() -> None:
    near = Pressure(usage=15 * GIB, limit=16 * GIB, available=900 * GIB, job=GIB)
    assert host_limit_rule(HostEvidence(pressure=near)) is None


@pytest.mark.parametrize(("usage", "job", "near"), [(90, 25, True), (89, 25, False), (90, 24, False)])
def test_a_limit_is_near_from_the_shares_of_the_policy_on(usage: int, job: int, near: bool) -> None:
    pressure = Pressure(usage=usage, limit=100, available=GIB, job=job)
    assert (host_limit_rule(HostEvidence(pressure=pressure)) is not None) == near


def test_swapped_memory_is_a_finding() -> None:
    finding = host_limit_rule(HostEvidence(swapped=GIB))
    assert finding is not None and finding.bytes == GIB and "swapped out" in finding.evidence[0]


# -- pinned ----------------------------------------------------------------------------------------------


def test_rounding_of_the_measured_tensor() -> None:
    """1.1 GiB pinned cost 2.00 GiB of RSS on an H200 with torch 2.11."""
    block = PinnedBlock(1_181_116_006, named("train.buffer"))
    finding = pinned_rounding(PinnedUse((block,), 2 * GIB, "2.11.0+cu130"))
    assert finding is not None
    assert finding.bytes == 2 * GIB - 1_181_116_006
    assert finding.holder == "train.buffer"


@given(st.integers(0, 1 << 44))
def test_a_rounded_block_is_the_next_power_of_two(nbytes: int) -> None:
    whole = nbytes + rounding(PinnedBlock(nbytes, None))
    assert whole.bit_count() <= 1
    assert whole == 0 if nbytes == 0 else whole // 2 < nbytes <= whole


def test_what_was_not_rounded_is_not_waste() -> None:
    block = PinnedBlock(1100 * MIB, None)
    assert pinned_rounding(PinnedUse((block,), 1100 * MIB, "2.15.0")) is None
    assert pinned_rounding(PinnedUse((), 0, "2.15.0")) is None
    assert pinned_rounding(None) is None


def test_powers_of_two_waste_nothing_and_cache_is_no_rounding() -> None:
    blocks = tuple(PinnedBlock(256 * MIB, None) for _ in range(4))
    assert pinned_rounding(PinnedUse(blocks, 2 * GIB, "2.13.0")) is None


# -- notes -----------------------------------------------------------------------------------------------


def test_mapped_files_that_grow_are_told_and_are_no_finding() -> None:
    evidence = HostEvidence(mapped_files=3 * GIB, mapped_files_first=GIB)
    assert host_findings(evidence) == []
    (note,) = host_notes(evidence)
    assert "not a leak" in note and "3.0 GiB" in note


def test_a_transient_peak_is_told() -> None:
    (note,) = host_notes(HostEvidence(highest_rss=2 * GIB, peak_rss=5 * GIB))
    assert "peaked at 5.0 GiB, 3.0 GiB above" in note
    assert host_notes(HostEvidence(highest_rss=20 * GIB, peak_rss=21 * GIB)) == []
    assert host_notes(HostEvidence(peak_rss=5 * GIB)) == host_notes(HostEvidence(highest_rss=5 * GIB)) == []


def test_findings_can_be_recorded() -> None:
    for finding in host_findings(HostEvidence(retention=kept(GIB, rss=2 * GIB), swapped=GIB)):
        assert msgspec.json.decode(msgspec.json.encode(finding), type=type(finding)) == finding


# -- thresholds ------------------------------------------------------------------------------------------


def workers(copied: int, population: int | None) -> HostEvidence:
    large = None if population is None else Population(named("train.names[*]"), "list", 9, population)
    return HostEvidence(workers=[worker(copied)], population=large)


def filled(used: int, grown: int) -> HostEvidence:
    return HostEvidence(shared_memory=SharedMemoryUse(used=used, total=100 * MIB, grown=grown))


def limited(usage: int, job: int) -> HostEvidence:
    return HostEvidence(pressure=Pressure(usage=usage, limit=100 * GIB, available=GIB, job=job))


def pinned(nbytes: int) -> HostEvidence:
    return HostEvidence(pinned=PinnedUse((PinnedBlock(nbytes, None),), 64 * GIB, "2.11.0"))


def test_a_little_of_everything_is_neither_a_finding_nor_a_note() -> None:
    for retention in (kept(150 * MIB, rss=MIB), kept(GIB, rss=10 * GIB)):
        assert host_findings(HostEvidence(retention=retention)) == []
    for evidence in (
        workers(32 * MIB, GIB), filled(50 * MIB, 9 * MIB), filled(90 * MIB, 4 * MIB),
        limited(50 * GIB, 50 * GIB), limited(95 * GIB, 5 * GIB), HostEvidence(swapped=16 * MIB),
        pinned(250 * MIB), HostEvidence(mapped_files=128 * MIB, mapped_files_first=0),
        HostEvidence(peak_rss=600 * MIB, highest_rss=500 * MIB),
    ):  # fmt: skip
        assert host_findings(evidence) == [] and host_notes(evidence) == []


def test_evidence_counts_arenas_and_processes() -> None:
    retention = Retention(step=5, resident=GIB, trimmable=GIB, arenas=1, rss=2 * GIB)
    (finding,) = host_findings(HostEvidence(retention=retention))
    assert finding.evidence[0] == "1.0 GiB free and resident in 1 arena of malloc, of 2.0 GiB resident"
    (finding,) = host_findings(HostEvidence(workers=[worker(400 * MIB)]))
    assert finding.evidence == [
        "1 process (pt_data_worker) un-shared 400.0 MiB each while watched; pages of their own now: up to "
        "410.0 MiB each"
    ]
    (finding,) = host_findings(HostEvidence(workers=[worker(400 * MIB), worker(400 * MIB, 2)]))
    assert finding.evidence[0].startswith("2 processes (pt_data_worker) un-shared 400.0 MiB each")


def test_what_a_limit_finding_counts_is_the_job_and_else_what_was_swapped() -> None:
    near = limited(95 * GIB, 50 * GIB)
    near.swapped = GIB
    (finding,) = host_findings(near)
    assert finding.bytes == 50 * GIB and len(finding.evidence) == 2
