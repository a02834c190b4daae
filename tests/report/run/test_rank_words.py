"""What is said of ranks: groups, and those that stand out in the same way in one line."""

from __future__ import annotations

from memtriage.diagnose.ranks.merge import merge
from memtriage.model.report import RunReport
from memtriage.report.run.rank_words import few_ranks, heading, rank_lines
from memtriage.store.reader import RankRecord
from memtriage.store.records import End
from support.runs import GIB, MIB, gpu_rank, leak, run


def said(report: RunReport) -> list[tuple[str, str]]:
    return [(line.who, line.what) for line in rank_lines(report)]


def ranks(count: int, **growth: int) -> list[RankRecord]:
    return [gpu_rank(number, count, growth=growth.get(f"rank{number}", 0)) for number in range(count)]


def test_a_run_without_ranks_is_told_nothing() -> None:
    assert said(merge(run(gpu_rank()))) == []


def test_ranks_that_are_alike_are_one_line() -> None:
    report = merge(run(*ranks(8)))
    assert said(report) == [
        ("8 ranks alike (0-7)", "18.0 GiB allocated, 27.0 GiB reserved, 5.0 GiB resident on the host")
    ]
    assert heading(report.rank_groups) == "none stands out; compared at the end of step 41"
    assert [line.stands_out for line in rank_lines(report)] == [False]


def test_ranks_leak_with_a_finding_and_grow_without() -> None:
    records = ranks(8, rank3=164 * MIB)
    assert said(merge(run(*records)))[1][1].startswith("grows 164.0 MiB per step; +6.6 GiB allocated")
    records[3].final_findings = [leak(rank=3, device="cuda:3")]
    who, what = said(merge(run(*records)))[1]
    assert (who, what.partition(";")[0]) == ("rank 3", "leaks 164.0 MiB per step")
    assert [line.stands_out for line in rank_lines(merge(run(*records)))] == [False, True]


def test_all_ranks_that_grow_alike_are_told_with_the_group() -> None:
    records = ranks(4, rank0=10 * MIB, rank1=10 * MIB, rank2=10 * MIB, rank3=10 * MIB)
    ((_, what),) = said(merge(run(*records)))
    assert what.endswith("growing 10.0 MiB per step")


def test_ranks_that_stand_out_in_the_same_way_share_a_line() -> None:
    records = ranks(16)
    for number, more in ((5, 6 * GIB), (9, 6 * GIB + 200 * MIB)):
        for mark in records[number].marks:
            if mark.device != "cpu" and mark.reserved:
                mark.reserved += more
    assert said(merge(run(*records)))[1] == ("ranks 5, 9", "+6.0 GiB to +6.2 GiB reserved")


def test_ends_and_counts() -> None:
    records = ranks(8)
    records[1] = gpu_rank(1, 8, steps=9)
    records[1].end, records[1].alive = None, False
    records[6] = gpu_rank(6, 8, steps=20, end=End(verdict="clean", steps=20, exit_code=0, time_s=80.0))
    records[7].marks = [mark for mark in records[7].marks if mark.name == "step"]
    assert said(merge(run(*records)))[1:] == [
        ("rank 1", "killed at step 9"),
        ("rank 6", "at step 20 when the others were at 41"),
        ("rank 7", "82 marks (readings of the counters) where the others have 247"),
    ]


def test_when_all_were_killed_none_stands_out_for_it() -> None:
    records = ranks(4)
    for record in records:
        record.end, record.alive = None, False
    report = merge(run(*records))
    assert report.verdict == "killed"
    assert [who for who, _ in said(report)] == ["4 ranks alike (0-3)"]


def test_ranks_that_have_nothing_in_common_are_not_called_alike() -> None:
    records = ranks(6)
    for number, record in enumerate(records):
        for mark in record.marks:
            if mark.device != "cpu":
                mark.allocated = (6 + 3 * number) * GIB
    ((who, what),) = said(merge(run(*records)))
    assert who == "6 ranks spread out (0-5)"
    assert what.startswith("6.0 GiB to 21.0 GiB allocated")


def test_long_lists_of_ranks_are_cut() -> None:
    assert few_ranks(range(1024)) == "0-1023"
    assert few_ranks(range(0, 1024, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, ..."


def test_without_gpus_it_is_malloc_that_is_compared() -> None:
    records = ranks(4)
    for record in records:
        record.marks = [mark for mark in record.marks if mark.device == "cpu"]
    for mark in records[2].marks:
        mark.allocated = (mark.allocated or 0) + GIB
    assert said(merge(run(*records))) == [
        (
            "3 ranks alike (0, 1, 3)",
            "2.0 GiB in use by malloc, 2.3 GiB held by malloc, 5.0 GiB resident on the host, "
            "growing 1.0 MiB per step",
        ),
        ("rank 2", "+1.0 GiB in use by malloc"),
    ]
