"""How ranks ended, and what their last host figures say of a kill."""

from __future__ import annotations

import pytest

from memtriage.diagnose.ranks.killed import Fate, fate, host_limit_finding, killed_note
from memtriage.model.findings import Finding
from memtriage.store.reader import RankRecord
from memtriage.store.records import HostSampleLine
from support.rank_records import rank_record

GIB = 1 << 30


def gone(*host: HostSampleLine, limit: int | None = None, rank: int | None = None) -> RankRecord:
    record: RankRecord = rank_record(rank, end=None, alive=False, host=host, host_limit=limit)
    return record


def found(*host: HostSampleLine, limit: int | None = None) -> Finding | None:
    record = gone(*host, limit=limit)
    return host_limit_finding(record, [record])


@pytest.mark.parametrize(
    ("end", "alive", "live", "expected"),
    [
        ("clean", False, False, "ended"),
        (None, False, False, "killed"),
        (None, None, False, "killed"),
        (None, True, False, "running"),
        (None, None, True, "running"),
        (None, False, True, "killed"),
    ],
)
def test_a_rank_without_an_end_is_killed_once_it_is_gone(
    end: str | None, alive: bool | None, live: bool, expected: Fate
) -> None:
    assert fate(rank_record(end=end, alive=alive), live=live) == expected


@pytest.mark.parametrize(
    ("sample", "limit", "left"),
    [
        pytest.param(HostSampleLine(cgroup_usage=95 * GIB, cgroup_limit=100 * GIB), None, 5, id="cgroup"),
        pytest.param(HostSampleLine(cgroup_usage=94 * GIB, cgroup_limit=100 * GIB), None, None, id="room"),
        pytest.param(
            HostSampleLine(cgroup_usage=97 * GIB, cgroup_limit=100 * GIB, cgroup_reclaimable=2 * GIB),
            None,
            5,
            id="page cache is room",
        ),
        pytest.param(
            HostSampleLine(cgroup_usage=97 * GIB, cgroup_limit=100 * GIB, cgroup_reclaimable=3 * GIB),
            None,
            None,
            id="enough page cache",
        ),
        pytest.param(HostSampleLine(cgroup_usage=95 * GIB), None, None, id="cgroup without a limit"),
        pytest.param(HostSampleLine(cgroup_limit=GIB, available=60 * GIB), 64 * GIB, None, id="no usage"),
        pytest.param(HostSampleLine(available=5 * GIB), 100 * GIB, 5, id="machine"),
        pytest.param(HostSampleLine(available=6 * GIB), 100 * GIB, None, id="machine with room"),
        pytest.param(HostSampleLine(available=0), None, None, id="of no known limit"),
        pytest.param(HostSampleLine(pss=96 * GIB), 100 * GIB, 4, id="process"),
        pytest.param(HostSampleLine(pss=80 * GIB, children_pss=16 * GIB), 100 * GIB, 4, id="with children"),
        pytest.param(HostSampleLine(pss=110 * GIB), 100 * GIB, 0, id="more than its limit"),
        pytest.param(HostSampleLine(rss=99 * GIB), 100 * GIB, None, id="shared pages may be counted twice"),
        pytest.param(HostSampleLine(pss=10 * GIB, available=2 * GIB), 100 * GIB, 2, id="the fullest counts"),
    ],
)
def test_at_five_percent_or_less_left_a_kill_is_put_down_to_the_limit(
    sample: HostSampleLine, limit: int | None, left: int | None
) -> None:
    finding = found(sample, limit=limit)
    assert (finding is not None) == (left is not None)
    if finding is not None:
        assert "who killed it is not in the record" in (finding.mechanism or "")
        assert finding.evidence[-1] == f"at most {left} % of the limit was left just before it died"


def test_the_fullest_of_the_last_three_samples_counts() -> None:
    full, free = HostSampleLine(available=GIB), HostSampleLine(available=50 * GIB)
    assert found(full, free, free, limit=64 * GIB) is not None
    assert found(full, free, free, free, limit=64 * GIB) is None
    assert found(limit=64 * GIB) is None


def test_a_finding_has_the_last_figures_and_what_the_process_held() -> None:
    earlier = HostSampleLine(rss=GIB, pss=GIB, available=GIB)
    last = HostSampleLine(time_s=12.4, rss=5 * GIB, pss=4 * GIB, children_pss=2 * GIB, available=GIB)
    record = gone(earlier, last, limit=64 * GIB, rank=3)
    finding = host_limit_finding(record, [record])
    assert finding is not None
    assert (finding.kind, finding.device, finding.rank, finding.step) == ("host_limit", "host", 3, 12)
    assert (finding.bytes, finding.playbook) == (6 * GIB, "M3")
    assert finding.evidence == [
        "the process had 5.0 GiB resident, its children 2.0 GiB 12 s after the start",
        "the machine had 1.0 GiB available",
        "at most 2 % of the limit was left just before it died",
    ]


@pytest.mark.parametrize(
    ("last", "nbytes"),
    [
        (HostSampleLine(rss=3 * GIB, available=0), 3 * GIB),
        (HostSampleLine(rss=3 * GIB, pss=2 * GIB, available=0), 2 * GIB),
        (HostSampleLine(children_pss=GIB, available=0), None),
    ],
)
def test_the_resident_set_stands_in_for_a_proportional_one(last: HostSampleLine, nbytes: int | None) -> None:
    finding = found(last, limit=64 * GIB)
    assert finding is not None and finding.bytes == nbytes


def test_a_kill_that_a_rank_of_the_same_machine_counted_is_evidence() -> None:
    killed = gone(HostSampleLine(oom_kill=1), HostSampleLine(oom_kill=1), rank=0)
    same = rank_record(1, host=[HostSampleLine(oom_kill=1), HostSampleLine(oom_kill=3), HostSampleLine()])
    other = rank_record(2, host=[HostSampleLine(oom_kill=7)])
    killed.start.host = same.start.host = "node0"
    other.start.host = "node1"
    finding = host_limit_finding(killed, [killed, same, other])
    assert finding is not None and finding.rank == 0
    assert "out-of-memory killer struck" in (finding.mechanism or "")
    assert finding.evidence == ["the cgroup's count of out-of-memory kills rose by 2 during the run"]
    assert host_limit_finding(killed, [killed, other]) is None
    uncounted = gone(HostSampleLine(rss=GIB), rank=0)
    uncounted.start.host = "node0"
    assert host_limit_finding(uncounted, [uncounted, same]) is None, "what its count was at the start is open"


@pytest.mark.parametrize(
    ("host", "limit", "said"),
    [
        ([], None, "no host figures recorded; what killed it is not in the record"),
        (
            [HostSampleLine(cgroup_usage=2 * GIB, cgroup_limit=64 * GIB, cgroup_reclaimable=GIB)],
            None,
            "its cgroup used 2.0 GiB of 64.0 GiB, 1.0 GiB of it page cache; what killed it is not in the "
            "record",
        ),
        (
            [HostSampleLine(cgroup_usage=2 * GIB)],
            None,
            "its cgroup used 2.0 GiB; what killed it is not in the record",
        ),
        ([HostSampleLine(available=GIB)], 64 * GIB, "the machine had 1.0 GiB available"),
    ],
)
def test_a_note_says_where_a_rank_was_last_seen(
    host: list[HostSampleLine], limit: int | None, said: str
) -> None:
    record = gone(*host, limit=limit, rank=2)
    assert killed_note(record, [record]) == (
        f"rank 2 was killed: last seen at step 12, 12 s after the start; {said}"
    )
