"""The job's ledger: own and common pages of every process, each counted once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import memtriage
from memtriage.account.job_ledger import job_ledger
from memtriage.observe.cgroup import CgroupMemory
from memtriage.observe.host import ChildSample, HostSample, ShmUse, children, host_sample, memory_classes

MIB = 1 << 20


def child(name: str, pss: int | None, uss: int | None, rss: int = 500 * MIB) -> ChildSample:
    return ChildSample(pid=1, name=name, rss=rss, pss=pss, uss=uss)


def test_workers_of_one_name_are_a_row() -> None:
    own = HostSample(rss=500 * MIB, pss=300 * MIB, uss=200 * MIB)
    below = [child("pt_data_worker", 110 * MIB, 10 * MIB), child("pt_data_worker", 120 * MIB, 20 * MIB)]
    ledger = job_ledger(own, [*below, child("tensorboard", 50 * MIB, 50 * MIB)], None, None)
    assert {row.row: row.bytes // MIB for row in ledger.rows} == {
        "this process: pages of its own": 200,
        "this process: its share of common pages": 100,
        "pt_data_worker: pages of its own": 30,
        "pt_data_worker: its share of common pages": 200,
        "tensorboard: pages of its own": 50,
    }
    assert ledger.total == 580 * MIB
    assert "2 processes" in str(ledger.rows[2].detail)


def test_children_are_named_by_the_work_that_they_do() -> None:
    below = [child("python", 10 * MIB, 10 * MIB), child("python", 20 * MIB, 20 * MIB)]
    below[1] = msgspec.structs.replace(below[1], pid=2)
    ledger = job_ledger(HostSample(rss=1, pss=1), below, None, None, {1: "workers of loader"})
    assert [(row.row, row.bytes // MIB) for row in ledger.rows[1:]] == [
        ("workers of loader: pages of its own", 10),
        ("python: pages of its own", 20),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_ledger_of_a_living_tree_sums_to_its_proportional_set() -> None:
    """Two forked processes, each with pages of its own and with pages of their parent, which waits."""
    program = (
        "import os, sys\n"
        "block, (ready, told) = bytearray(b'x') * (64 << 20), os.pipe()\n"
        "for number in range(2):\n"
        "    if os.fork() == 0:\n"
        "        block[: 16 << 20] = b'y' * (16 << 20); os.write(told, b'1'); sys.stdin.read(); os._exit(0)\n"
        "os.read(ready, 1), os.read(ready, 1); print(flush=True); sys.stdin.read(); os.wait(); os.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        ledger = job_ledger(host_sample(Path(f"/proc/{process.pid}")), children(process.pid), None, None)
        tree = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in tree]
        process.communicate()
    whole = sum(
        int(line.split()[1]) << 10 for text in texts for line in text.splitlines() if line.startswith("Pss:")
    )
    assert len(tree) == 3 and whole > 96 * MIB
    assert ledger.total == pytest.approx(whole, rel=0.01)


def test_limits_are_told_with_it() -> None:
    group = CgroupMemory(
        version=2, path="/g", limit=8 << 30, usage=6 << 30, inactive_file=1 << 30, oom_kill=2
    )
    ledger = job_ledger(HostSample(rss=1), [], ShmUse(64 * MIB, 16 * MIB), group)
    assert "6.0 GiB charged, 1.0 GiB of it page cache, limit 8.0 GiB, 2 kills" in ledger.source
    assert "16.0 MiB of 64.0 MiB used" in ledger.source


sizes = st.none() | st.integers(0, 1 << 40)


@given(st.lists(st.builds(child, st.sampled_from("ab"), sizes, sizes), max_size=5), sizes, sizes)
def test_it_sums_to_the_proportional_sets(below: list[ChildSample], pss: int | None, uss: int | None) -> None:
    own = HostSample(rss=7, pss=pss, uss=uss)
    ledger = job_ledger(own, below, None, None)
    whole = sum(each.rss or 0 if each.pss is None else each.pss for each in [own, *below])
    assert ledger.total == sum(row.bytes for row in ledger.rows) == whole
    assert all(row.bytes > 0 for row in ledger.rows)


def test_this_process_has_one() -> None:
    (ledger,) = memtriage.ledger("job")
    assert ledger.device == "job"
    classes = memory_classes()
    assert classes is None or 0.5 * classes.total < ledger.total < 2 * classes.total
