"""Resident memory by class of mapping, by range, and of children, against memory of known size."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from memtriage.observe import host
from memtriage.observe.host import (
    ChildSample,
    HostSample,
    PinnedStats,
    children,
    dev_shm,
    host_sample,
    in_use,
    memory_classes,
    pinned,
    pinned_stats,
    resident,
    rss,
)
from support.certain import certain
from support.own_process import printed_by

KIB, MIB = 1 << 10, 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc")


def test_a_file_on_tmpfs_is_recognized_by_its_mount(tmp_path: Path) -> None:
    (tmp_path / "smaps").write_text(
        "7f000c000000-7f000d000000 rw-s 00000000 00:1b 33   /scratch/in_memory.bin\n"
        "Size: 999 kB\nRss:      2048 kB\nAnonymous:  0 kB\nVmFlags: rd wr\n"
    )
    (tmp_path / "mountinfo").write_text(
        "25 24 0:27 / /scratch rw,relatime - tmpfs tmpfs rw\n26 24 254:0 / / rw - ext4 /dev/vda rw\n"
    )
    classes = certain(memory_classes(tmp_path))
    assert classes.resident("shared") == 2 * MIB


def test_no_smaps_is_unknown(tmp_path: Path) -> None:
    assert memory_classes(tmp_path) is None
    (tmp_path / "smaps").write_text("")
    assert memory_classes(tmp_path) is None


@linux
def test_this_process_closes_against_its_own_smaps_rollup() -> None:
    classes, sample = memory_classes(), host_sample()
    assert classes is not None and sample.rss is not None
    assert sum(mapping.rss for mapping in classes.mappings) == classes.total
    assert abs(classes.total - sample.rss) < 16 * MIB
    assert classes.resident("library") > MIB
    assert classes.resident("stack") > 0


@linux
def test_memory_outside_malloc_is_known_by_its_mapping(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(bytes(1 << 20))
    elsewhere = {
        "anonymous, shared": mmap.mmap(-1, 1 << 20),
        "anonymous, private": mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    }
    arrays = {name: np.frombuffer(mapping, np.uint8) for name, mapping in elsewhere.items()}
    arrays["file"] = np.memmap(file, np.uint8, mode="c")
    arrays["small"], arrays["large"] = np.zeros(64, np.uint8), np.zeros(4 << 20, np.uint8)
    ranges = host.mapped_ranges()
    mapped = {name for name, array in arrays.items() if any(array.ctypes.data in each for each in ranges)}
    assert mapped == {"anonymous, shared", "file"}


def test_shared_and_private_mappings_are_distinguished(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(b"x" * (4 * MIB))
    shared = mmap.mmap(-1, 3 * MIB)
    shared[:] = b"y" * (3 * MIB)
    values = np.memmap(path, dtype=np.uint8, mode="c")
    assert values.sum() == ord("x") * 4 * MIB
    values[: 2 * MIB] = 7
    classes = certain(memory_classes())
    (mine,) = [mapping for mapping in classes.mappings if mapping.name == str(path)]
    address = np.frombuffer(shared, dtype=np.uint8).ctypes.data
    ((_, _, anonymous),) = classes.covering(address, address + 1)
    assert mine.kind in ("file", "shared")  # shared where the test directory is on tmpfs
    assert (mine.rss, mine.anonymous) == (4 * MIB, 2 * MIB)
    assert (anonymous.kind, anonymous.rss) == ("shared anonymous", 3 * MIB)


@linux
class TestResident:
    """Pages touched in an anonymous mapping of 64 pages, 4 KiB each even where huge pages are the rule."""

    @pytest.fixture
    def area(self) -> tuple[np.ndarray, int]:
        memory = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        values = np.frombuffer(memory, dtype=np.uint8)
        return values, values.ctypes.data

    def test_untouched_memory_is_not_resident(self, area: tuple[np.ndarray, int]) -> None:
        _, address = area
        assert resident(address, 64 * PAGE) == 0

    def test_only_touched_pages_count(self, area: tuple[np.ndarray, int]) -> None:
        values, address = area
        values[5 * PAGE : 9 * PAGE] = 1
        assert resident(address, 64 * PAGE) == 4 * PAGE

    def test_a_range_inside_pages_counts_its_own_bytes(self, area: tuple[np.ndarray, int]) -> None:
        values, address = area
        values[0] = values[2 * PAGE] = 1  # pages 0 and 2
        assert resident(address + 100, 2 * PAGE) == (PAGE - 100) + 100
        assert resident(address + 100, 50) == 50
        assert resident(address + PAGE + 1, 50) == 0

    def test_a_range_read_in_pieces_gives_the_same(
        self, area: tuple[np.ndarray, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        values, address = area
        values[::PAGE] = 1
        monkeypatch.setattr(host, "_PAGEMAP_PIECE", 3)
        assert resident(address + 10, 60 * PAGE) == 60 * PAGE
        assert resident(address, 3 * PAGE) == 3 * PAGE
        assert resident(address + 1, 2 * PAGE) == 2 * PAGE

    def test_nothing_asked_nothing_found(self, area: tuple[np.ndarray, int]) -> None:
        assert resident(area[1], 0) == 0

    def test_unknown_off_linux(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        assert resident(PAGE, PAGE) is None


@linux
def test_a_forked_child_reads_its_own_rss() -> None:
    before, in_child, in_parent = printed_by(
        "import os, sys\n"
        "from memtriage.observe.host import rss\n"
        "before = rss()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    block = bytearray(b'x') * (64 << 20)\n"
        "    print(before, rss(), flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(rss())\n"
    )
    assert in_child - before > 48 * MIB
    assert in_parent - before < 16 * MIB


@linux
def test_rss_survives_somebody_closing_its_descriptor() -> None:
    assert rss() is not None
    opened = certain(host._STATM._opened)
    os.close(opened[1].number)
    assert (rss() or 0) > MIB


def test_rss_elsewhere_comes_from_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: SimpleNamespace(rss=12345))
    assert rss() == 12345


def test_importing_observes_nothing_and_loads_no_heavy_module() -> None:
    script = (
        "import sys\n"
        "import memtriage.observe.host, memtriage.observe.malloc, memtriage.observe.cgroup\n"
        "heavy = {'torch', 'numpy', 'psutil', 'rich', 'pynvml'}\n"
        "print(len(heavy & set(sys.modules)))"
    )
    assert printed_by(script) == [0]


def test_host_sample_reads_both_files(tmp_path: Path) -> None:
    (tmp_path / "status").write_text(
        "Name:\tpython\nVmHWM:\t  900 kB\nVmLck:\t 5 kB\nVmRSS:\t 700 kB\n"
        "RssAnon:\t 300 kB\nRssFile:\t 250 kB\nRssShmem:\t 150 kB\nVmSwap:\t 9 kB\nThreads:\t3\n"
    )
    assert host_sample(tmp_path) == HostSample(
        rss=700 * KIB,
        swap=9 * KIB,
        peak_rss=900 * KIB,
    )
    (tmp_path / "smaps_rollup").write_text(
        "55c3-7ffd ---p 00000000 00:00 0   [rollup]\n"
        "Rss:      704 kB\nPss:      500 kB\nAnonymous:   304 kB\nSwap:     8 kB\nLocked:   0 kB\n"
    )
    sample = host_sample(tmp_path)
    assert (sample.rss, sample.pss, sample.swap) == (704 * KIB, 500 * KIB, 8 * KIB)


def test_host_sample_without_proc_is_unknown(tmp_path: Path) -> None:
    assert host_sample(tmp_path) == HostSample()


@linux
def test_peak_is_at_least_the_present() -> None:
    host_sample()  # its own memory is there by the second reading
    sample = host_sample()
    assert sample.rss and sample.peak_rss
    assert sample.peak_rss >= sample.rss


@pytest.fixture
def child() -> subprocess.Popen[bytes]:
    script = "import sys; print('ready', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def of(process: subprocess.Popen[bytes]) -> list[ChildSample]:
    return [sample for sample in children() if sample.pid == process.pid]


@linux
def test_a_child_is_listed_until_it_ends(child: subprocess.Popen[bytes]) -> None:
    with child:
        (sample,) = of(child)
        assert sample.name.startswith("python")
        assert sample.rss and sample.pss and sample.uss
        assert 0 < sample.uss <= sample.pss <= sample.rss
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet waited for: a zombie
        assert of(child) == []
    assert child.returncode == -signal.SIGKILL
    assert of(child) == []


@linux
def test_children_of_a_process_that_is_gone(child: subprocess.Popen[bytes]) -> None:
    with child:
        child.kill()
    assert children(child.pid) == []


def test_dev_shm_is_used_in_part(tmp_path: Path) -> None:
    use = certain(dev_shm(tmp_path))
    assert 0 < use.used <= use.total


def test_dev_shm_absent_is_unknown(tmp_path: Path) -> None:
    assert dev_shm(tmp_path / "absent") is None


def test_pinned_statistics_of_each_generation() -> None:
    newer = {"allocated_bytes": {"current": 96}, "active_bytes": {"current": 64}, "num_host_alloc": 3}
    older = {"reserved_bytes": {"current": 96}, "allocated_bytes": {"current": 64}, "segment": {"current": 2}}
    assert pinned_stats(newer, True) == PinnedStats(owned=96, active=64, cached=32)
    assert pinned_stats(newer, False) == PinnedStats(owned=96, active=None, cached=None)
    assert pinned_stats(older, False) == PinnedStats(owned=96, active=None, cached=None)
    assert pinned_stats({}, True) is None


@pytest.mark.parametrize(
    ("initialized", "version", "expected"),
    [
        (True, "2.13.0+cu130", PinnedStats(8, 2, 6)),
        (True, "2.15.0a0+git12", PinnedStats(8, 2, 6)),
        (True, "2.11.0+cu130", PinnedStats(8)),
        (True, "2.8.0", PinnedStats(8)),
        (False, "2.13.0", None),
    ],
)
def test_pinned_asks_torch_only_after_cuda_began(
    monkeypatch: pytest.MonkeyPatch, initialized: bool, version: str, expected: PinnedStats | None
) -> None:
    def stats() -> dict[str, dict[str, int]]:
        assert initialized
        return {"allocated_bytes": {"current": 8}, "active_bytes": {"current": 2}}

    memory = SimpleNamespace(host_memory_stats_as_nested_dict=stats)
    cuda = SimpleNamespace(is_initialized=lambda: initialized, memory=memory)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, __version__=version))
    assert pinned() == expected


def test_pinned_without_torch_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert pinned() is None
    assert "torch" not in sys.modules


@linux
def test_pages_of_a_forked_child_become_its_own_when_it_writes() -> None:
    """The parent reads its child before and after the child writes to 64 MiB that they shared."""
    program = (
        "import os\n"
        "from memtriage.observe.host import children\n"
        "block = bytearray(b'x') * (64 << 20)\n"
        "(ready, told), (waiting, go) = os.pipe(), os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.write(told, b'1'); os.read(waiting, 1)\n"
        "    for at in range(0, len(block), 4096): block[at] = 1\n"
        "    os.write(told, b'2'); os.read(waiting, 1); os._exit(0)\n"
        "os.read(ready, 1); (before,) = children(); os.write(go, b'1')\n"
        "os.read(ready, 1); (after,) = children(); os.write(go, b'1')\n"
        "os.wait()\n"
        "print(before.shared_anon - after.shared_anon, after.uss - before.uss)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lost, gained = map(int, done.stdout.split())
    assert 60 * MIB < lost < 72 * MIB
    assert 60 * MIB < gained < 72 * MIB


def test_what_is_in_use_are_the_columns_of_statm() -> None:
    before = in_use()
    pages = Path("/proc/self/statm").read_text().split()
    columns = [int(column) * os.sysconf("SC_PAGE_SIZE") for column in pages]
    after = in_use()
    assert before is not None and after is not None
    for name, column in (("mapped", 0), ("resident", 1), ("data", 5)):
        low, high = sorted((getattr(before, name), getattr(after, name)))
        assert low - (8 << 20) <= columns[column] <= high + (8 << 20)
