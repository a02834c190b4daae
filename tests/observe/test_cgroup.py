"""Limits must be found in every layout of control groups; trees under tmp_path stand for the machine's."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.observe.cgroup import HostLimit, cgroup_memory, counted, host_limit
from memtriage.observe.host import InUse
from support.certain import certain

GIB = 1 << 30
NO_LIMIT_V1 = 0x7FFFFFFFFFFFF000
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


class Machine:
    """A fake root directory with /proc/self and control groups."""

    def __init__(self, root: Path, groups: str, mounts: str, mem_total: int = 64 * GIB) -> None:
        self.root = root
        self.proc = root / "proc/self"
        self.proc.mkdir(parents=True)
        (self.proc / "cgroup").write_text(groups)
        (self.proc / "mountinfo").write_text(mounts)
        (root / "proc/meminfo").write_text(f"MemTotal:       {mem_total >> 10} kB\nMemFree: 1 kB\n")

    def group(self, path: str, **files: object) -> str:
        directory = self.root / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (directory / ("memory." + name)).write_text(f"{content}\n")
        return str(directory)


@pytest.fixture(autouse=True)
def no_resource_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: unlimited)


def test_v2_reads_the_group_that_limits(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/kubepods/pod1/main\n", V2_MOUNT)
    top = "sys/fs/cgroup"
    machine.group(top, stat="anon 9\n")  # the root group has no memory.max
    machine.group(f"{top}/kubepods", max="max", current=50 * GIB, stat="anon 8\n")
    pod = machine.group(
        f"{top}/kubepods/pod1",
        max=8 * GIB,
        current=6 * GIB,
        stat=f"anon {3 * GIB}\nfile {2 * GIB}\ninactive_file {GIB}\nshmem 4096\nslab 7",
        events="low 0\nmax 12\noom 2\noom_kill 1",
    )
    machine.group(f"{top}/kubepods/pod1/main", max=9 * GIB, current=5 * GIB, stat="anon 1\n")
    memory = certain(cgroup_memory(machine.proc, machine.root))
    assert (memory.version, memory.path) == (2, pod)
    assert (memory.limit, memory.usage) == (8 * GIB, 6 * GIB)
    assert (memory.file, memory.inactive_file) == (2 * GIB, GIB)
    assert (memory.shmem, memory.oom_kill) == (4096, 1)
    assert host_limit(machine.proc, machine.root) == (8 * GIB, f"cgroup v2 {pod}")


@pytest.mark.parametrize("path", ["/", "/../../outside", "/docker/not/mounted/here"])
def test_v2_in_a_container_a_path_that_it_does_not_see_is_the_mount(tmp_path: Path, path: str) -> None:
    machine = Machine(tmp_path, f"0::{path}\n", V2_MOUNT)
    machine.group("sys/fs/cgroup", max=2 * GIB, current=GIB, stat="anon 5\n")
    (tmp_path / "sys/outside").mkdir()
    memory = certain(cgroup_memory(machine.proc, machine.root))
    assert (memory.limit, memory.usage) == (2 * GIB, GIB)


def test_v2_unlimited_reports_the_own_group(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/user.slice\n", V2_MOUNT)
    machine.group("sys/fs/cgroup", stat="anon 9\n")
    own = machine.group("sys/fs/cgroup/user.slice", max="max", current=GIB, stat="anon 7\n")
    memory = certain(cgroup_memory(machine.proc, machine.root))
    assert (memory.path, memory.limit, memory.usage) == (own, None, GIB)
    assert host_limit(machine.proc, machine.root) == (64 * GIB, "MemTotal")


def v1_mount(mount_root: str, point: str = "/sys/fs/cgroup/memory") -> str:
    return (
        "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
        f"35 31 0:32 {mount_root} {point} rw,relatime - cgroup cgroup rw,memory\n"
    )


V1_GROUPS = "5:devices:/x\n4:cpu,memory:/docker/abc\n0::/ignored\n"
V1_STAT = (
    f"cache 1\nrss 2\ntotal_cache {2 * GIB}\ntotal_rss {GIB}\ntotal_inactive_file 4096\ntotal_shmem 8192"
)


def test_v1_docker_mounts_the_group_itself(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V1_GROUPS, v1_mount("/docker/abc"))
    machine.group(
        "sys/fs/cgroup/memory",
        limit_in_bytes=4 * GIB,
        usage_in_bytes=3 * GIB,
        stat=V1_STAT,
        oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3",
    )
    memory = certain(cgroup_memory(machine.proc, machine.root))
    assert memory.version == 1
    assert (memory.limit, memory.usage) == (4 * GIB, 3 * GIB)
    assert (memory.file, memory.inactive_file) == (2 * GIB, 4096)
    assert (memory.shmem, memory.oom_kill) == (8192, 3)


def test_v1_limit_of_a_hidden_parent_is_seen(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V1_GROUPS, v1_mount("/docker/abc"))
    machine.group(
        "sys/fs/cgroup/memory",
        limit_in_bytes=NO_LIMIT_V1,
        usage_in_bytes=5,
        stat=f"{V1_STAT}\nhierarchical_memory_limit {3 * GIB}",
    )
    memory = certain(cgroup_memory(machine.proc, machine.root))
    assert memory.limit == 3 * GIB


def test_v1_walks_up_a_fully_visible_hierarchy(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V1_GROUPS, v1_mount("/"))
    top = "sys/fs/cgroup/memory"
    machine.group(top, limit_in_bytes=NO_LIMIT_V1, usage_in_bytes=9, stat=V1_STAT)
    parent = machine.group(f"{top}/docker", limit_in_bytes=GIB, usage_in_bytes=7, stat=V1_STAT)
    machine.group(f"{top}/docker/abc", limit_in_bytes=NO_LIMIT_V1, usage_in_bytes=5, stat=V1_STAT)
    memory = certain(cgroup_memory(machine.proc, machine.root))
    assert (memory.path, memory.limit, memory.usage) == (parent, GIB, 7)


UNIFIED = V2_MOUNT.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")


def test_hybrid_without_a_v1_memory_controller_uses_v2(tmp_path: Path) -> None:
    mounts = "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n" + UNIFIED
    machine = Machine(tmp_path, "1:cpu:/x\n0::/job\n", mounts)
    machine.group("sys/fs/cgroup/unified", stat="anon 1\n")
    machine.group("sys/fs/cgroup/unified/job", max=GIB, current=4, stat="anon 1\n")
    memory = certain(cgroup_memory(machine.proc, machine.root))
    assert (memory.version, memory.limit) == (2, GIB)


def test_hybrid_prefers_v1_where_it_has_the_memory_controller(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V1_GROUPS, UNIFIED + v1_mount("/"))
    machine.group("sys/fs/cgroup/unified/ignored")  # no memory files: the controller is v1's
    machine.group("sys/fs/cgroup/memory/docker/abc", limit_in_bytes=GIB, usage_in_bytes=1, stat=V1_STAT)
    memory = certain(cgroup_memory(machine.proc, machine.root))
    assert (memory.version, memory.limit) == (1, GIB)


def test_mount_point_with_an_escaped_space(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V1_GROUPS, v1_mount("/", r"/my\040groups"))
    machine.group("my groups/docker/abc", limit_in_bytes=GIB, usage_in_bytes=1, stat=V1_STAT)
    memory = certain(cgroup_memory(machine.proc, machine.root))
    assert memory.limit == GIB


@pytest.mark.parametrize(
    ("groups", "mounts"),
    [("", ""), ("0::/\n", V2_MOUNT), ("3:cpu:/x\n", ""), ("garbage\n", "garbage\n")],
)
def test_none_without_a_memory_controller(tmp_path: Path, groups: str, mounts: str) -> None:
    machine = Machine(tmp_path, groups, mounts)
    assert cgroup_memory(machine.proc, machine.root) is None
    assert host_limit(machine.proc, machine.root) == (64 * GIB, "MemTotal")


def test_none_without_proc(tmp_path: Path) -> None:
    assert cgroup_memory(tmp_path / "proc/self", tmp_path) is None


def test_limit_above_the_machine_is_the_machine(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/\n", V2_MOUNT, mem_total=16 * GIB)
    machine.group("sys/fs/cgroup", max=90 * GIB, current=GIB, stat="anon 5\n")
    assert host_limit(machine.proc, machine.root) == (16 * GIB, "MemTotal")


def test_a_resource_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, "", "")
    limits = {resource.RLIMIT_AS: 3 * GIB, resource.RLIMIT_DATA: 5 * GIB}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], resource.RLIM_INFINITY))
    assert host_limit(machine.proc, machine.root) == (3 * GIB, "RLIMIT_AS")


def test_use_is_counted_as_the_limit_counts_it() -> None:
    used = InUse(mapped=7, resident=2, data=5, shared=1)
    sources = ("RLIMIT_AS", "RLIMIT_DATA", "MemTotal", "cgroup v2 /")
    assert [counted(HostLimit(GIB, source), used) for source in sources] == [7, 5, 2, 2]


@given(limits=st.lists(st.none() | st.integers(1, 1 << 50), min_size=1, max_size=5))
def test_the_limit_is_the_least_on_the_way_up(
    tmp_path_factory: pytest.TempPathFactory, limits: list[int | None]
) -> None:
    names = [f"level{depth}" for depth in range(len(limits))]
    machine = Machine(tmp_path_factory.mktemp("machine"), f"0::/{'/'.join(names)}\n", V2_MOUNT)
    machine.group("sys/fs/cgroup", stat="anon 1\n")
    for depth, limit in enumerate(limits):
        path = "/".join(names[: depth + 1])
        machine.group(f"sys/fs/cgroup/{path}", max="max" if limit is None else limit, current=depth)
    memory = certain(cgroup_memory(machine.proc, machine.root))
    assert memory.limit == min((limit for limit in limits if limit is not None), default=None)


def test_this_machine_has_a_limit() -> None:
    limit = host_limit()
    assert limit.bytes > 0
    assert limit.source
