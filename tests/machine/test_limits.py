import pytest

from memtriage.machine.limits import limits, resource_limits, shared_memory
from memtriage.observe.cgroup import CgroupMemory

GiB = 1024**3


def by_name(facts):
    return {fact.name: fact for fact in facts}


def test_shared_memory():
    small, large = shared_memory(64 * 1024**2, 0), shared_memory(16 * GiB, GiB)
    assert small.status == "bad" and "--shm-size" in small.advice
    assert large.value == "16.0 GiB, 1.0 GiB in use" and large.advice is None
    assert shared_memory(None, None).value == "none"


def test_resource_limits():
    unlimited = by_name(resource_limits(None, None))
    assert {fact.value for fact in unlimited.values()} == {"no limit"}
    limited = by_name(resource_limits(8 * GiB, 64 * 1024))
    assert (limited["RLIMIT_AS"].status, limited["RLIMIT_MEMLOCK"].status) == ("bad", "note")
    assert (limited["RLIMIT_AS"].value, limited["RLIMIT_MEMLOCK"].value) == ("8.0 GiB", "64.0 KiB")


def test_what_is_enough_comes_without_advice():
    assert shared_memory(GiB, 0).advice is None and shared_memory(GiB - 1, 0).advice
    plain = by_name(resource_limits(None, None))
    assert [fact.advice for fact in plain.values()] == [None, None]
    assert [fact.status for fact in plain.values()] == ["ok", "ok"]
    tight = by_name(resource_limits(GiB, GiB - 1))
    assert "ulimit -v" in tight["RLIMIT_AS"].advice and "ulimit -l" in tight["RLIMIT_MEMLOCK"].advice


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (None, {"cgroup": "no memory controller"}),
        (
            CgroupMemory(version=2, path="/g", usage=GiB, limit=None),
            {"cgroup v2": "no limit, 1.0 GiB in use"},
        ),
        (
            CgroupMemory(version=1, path="/g", usage=GiB, limit=2 * GiB, oom_kill=3),
            {
                "cgroup v1": "limit 2.0 GiB, 1.0 GiB in use",
                "killed for memory": "3 processes of this cgroup so far",
            },
        ),
    ],
)
def test_the_limit_of_the_control_group(group, said, monkeypatch):
    monkeypatch.setattr("memtriage.machine.limits.cgroup_memory", lambda: group)
    found = {
        name: fact.value for name, fact in by_name(limits()).items() if name.startswith(("cgroup", "killed"))
    }
    assert found == said
