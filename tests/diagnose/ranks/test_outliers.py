"""Ranks whose memory stands out from the others' at the same mark."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.ranks.merge import merge
from memtriage.diagnose.ranks.outliers import compare_ranks
from memtriage.model.units import size
from memtriage.store.reader import RunRecord
from support.rank_records import marks, rank_record

MiB = 1024**2
GiB = 1024**3


def merged(*ranks):
    return merge(RunRecord(list(ranks)))


def by_kind(report, kind):
    return [finding for finding in report.findings if finding.kind == kind]


class TestRankDiffers:
    def report(self, series, **options):
        ranks = [
            rank_record(number, world_size=len(series), allocated=values)
            for number, values in enumerate(series)
        ]
        for rank, reserved in zip(ranks, options.get("reserved", []), strict=False):
            rank.marks = marks(rank.start.rank, [mark.allocated for mark in rank.marks], reserved=reserved)
        return by_kind(merged(*ranks), "rank_differs")

    def test_equal_ranks_do_not_differ(self):
        assert self.report([[GiB] * 12] * 8) == []

    def test_one_rank_with_more(self):
        (finding,) = self.report([[8 * GiB] * 12] * 7 + [[12 * GiB] * 12])
        assert (finding.rank, finding.bytes, finding.bytes_per_step) == (7, 12 * GiB, None)
        assert finding.evidence == [
            "allocated at step 12: 12.0 GiB; the median of the 7 other ranks is 8.0 GiB, "
            "their median absolute deviation 0 B"
        ]

    def test_one_rank_that_grows(self):
        growing = [8 * GiB + step * 10 * MiB for step in range(12)]
        (finding,) = self.report([[8 * GiB] * 12, growing])
        assert finding.rank == 1
        assert finding.bytes_per_step == pytest.approx(10 * MiB, rel=0.3)
        assert finding.bytes == growing[-1]
        assert finding.evidence[0].startswith(f"growth at step 12: {size(finding.bytes_per_step)} per step; ")
        assert "the other rank has 0 B per step" in finding.evidence[0]
        assert finding.playbook == "M21"

    def test_of_two_ranks_the_larger_is_named(self):
        (finding,) = self.report([[12 * GiB] * 12, [8 * GiB] * 12])
        assert finding.rank == 0

    def test_one_rank_with_less_among_many_is_named(self):
        (finding,) = self.report([[8 * GiB] * 12] * 5 + [[GiB] * 12])
        assert finding.rank == 5

    def test_all_ranks_grow_alike(self):
        assert self.report([[GiB + step * 100 * MiB for step in range(12)]] * 4) == []

    def test_a_rank_that_grows_less_is_not_named_for_that(self):
        growing = [8 * GiB + step * MiB for step in range(12)]
        assert self.report([growing] * 4 + [[8 * GiB] * 12]) == []

    def test_small_differences_are_alike(self):
        assert self.report([[8 * GiB + rank * 20 * MiB] * 12 for rank in range(8)]) == []

    def test_ranks_that_are_spread_out_are_alike(self):
        assert self.report([[(4 + rank) * GiB] * 12 for rank in range(8)]) == []

    def test_two_groups_of_ranks_are_no_outliers(self):
        assert self.report([[8 * GiB] * 12] * 4 + [[12 * GiB] * 12] * 4) == []

    @given(st.lists(st.integers(min_value=0, max_value=9), min_size=3, max_size=9))
    def test_evidence_states_median_and_deviation_of_the_others(self, levels):
        values = [100 * GiB] + [level * GiB for level in levels]
        ranks = [rank_record(rank, world_size=len(values), allocated=[value] * 4)
                 for rank, value in enumerate(values)]  # fmt: skip
        report = merged(*ranks)
        apart = {outlier.rank: outlier for outlier in report.rank_groups.outliers}
        for finding in by_kind(report, "rank_differs"):
            home = report.rank_groups.groups[apart[finding.rank].group].ranks
            same = [rank for rank, other in apart.items() if other.group == apart[finding.rank].group]
            others = [values[rank] for rank in {*home, *same} - {finding.rank}]
            middle = median(others)
            spread = median(abs(other - middle) for other in others)
            peers = "ranks" if len(report.rank_groups.groups) == 1 else "ranks of its group"
            if len(others) == 1:
                continue
            assert f"median of the {len(others)} other {peers} is {size(middle)}," in finding.evidence[0]
            assert finding.evidence[0].endswith(f"deviation {size(spread)}")

    def test_reserved_alone(self):
        (finding,) = self.report([[GiB] * 12] * 4, reserved=[2 * GiB, 2 * GiB, 2 * GiB, 9 * GiB])
        assert (finding.rank, finding.bytes) == (3, 9 * GiB)
        assert finding.evidence[0].startswith("reserved at step 12")

    def test_ranks_are_compared_where_most_of_them_came(self):
        grown = [GiB + step * 200 * MiB for step in range(100)]
        short = grown[:10]
        assert self.report([grown, grown, grown, short]) == []

    def test_long_runs_that_recorded_other_steps_are_compared_nearby(self):
        values = [8 * GiB] * 400
        ranks = [rank_record(number, world_size=3, allocated=values) for number in range(3)]
        ranks[2].marks = marks(2, [12 * GiB] * 400)
        for offset, rank in enumerate(ranks):
            rank.marks = rank.marks[offset::7]
        (finding,) = by_kind(merged(*ranks), "rank_differs")
        assert finding.rank == 2

    def test_each_rank_is_seen_on_its_own_gpu(self):
        ranks = [rank_record(number, world_size=2) for number in range(2)]
        for number, rank in enumerate(ranks):
            rank.marks = marks(number, [8 * GiB] * 12, device=f"cuda:{number}") + marks(
                number, [number * GiB] * 12, device="cpu"
            )
        assert merged(*ranks).findings == []

    @given(st.lists(st.sampled_from([0, GiB, 2 * GiB, 3 * GiB, 40 * GiB]), min_size=2, max_size=6))
    def test_a_minority_is_named_whatever_its_rank_numbers(self, levels):
        named = {finding.rank for finding in self.report([[level] * 4 for level in levels])}
        assert 2 * len(named) < len(levels) or (len(levels) == 2 and len(named) == 1)
        order = sorted(range(len(levels)), key=levels.__getitem__)
        reordered = {finding.rank for finding in self.report([[levels[index]] * 4 for index in order])}
        assert {levels[rank] for rank in named} == {levels[order[rank]] for rank in reordered}

    def test_a_peak_is_of_no_step(self):
        ranks = [rank_record(number, world_size=4) for number in range(4)]
        for number, rank in enumerate(ranks):
            rank.end.peak_allocated = {"cuda:0": (9 if number == 2 else 3) * GiB}
        (finding,) = by_kind(merged(*ranks), "rank_differs")
        assert (finding.rank, finding.device, finding.bytes) == (2, "cuda:0", 9 * GiB)
        assert finding.evidence == [
            "peak: 9.0 GiB; the median of the 3 other ranks is 3.0 GiB, their median absolute deviation 0 B"
        ]

    def test_host_memory_is_the_host_s(self):
        ranks = [rank_record(number, world_size=4) for number in range(4)]
        for mark in ranks[1].marks:
            mark.host_rss = 30 * GiB
        (finding,) = by_kind(merged(*ranks), "rank_differs")
        assert (finding.rank, finding.device, finding.bytes) == (1, "host", 30 * GiB)


def records(count, **options):
    return [rank_record(number, world_size=count, **options) for number in range(count)]


def test_one_rank_is_compared_with_none():
    found = compare_ranks(records(1))
    assert (found.groups, found.findings) == (None, [])


def test_three_in_four_ranks_must_have_come_as_far():
    ranks = records(4, allocated=(GiB,) * 100)
    ranks[0].marks = marks(0, [GiB] * 50 + [40 * GiB] * 50)
    ranks[3].marks = ranks[3].marks[:10]
    found = compare_ranks(ranks)
    assert (found.groups.mark, found.groups.step) == ("step", 100)
    assert [finding.rank for finding in found.findings] == [0]
    ranks[2].marks = ranks[2].marks[:10]
    assert (compare_ranks(ranks).groups.step, compare_ranks(ranks).findings) == (10, [])


def test_a_rank_that_is_too_far_behind_is_compared_in_its_steps_only():
    ranks = records(5, allocated=(GiB,) * 100)
    ranks[4].marks = marks(4, [40 * GiB] * 94)
    found = compare_ranks(ranks)
    assert found.groups.figures[4].base is None and found.findings == []
    ranks[4].marks = marks(4, [40 * GiB] * 95)
    assert [finding.rank for finding in compare_ranks(ranks).findings] == [4]


def test_without_steps_backwards_are_compared():
    ranks = records(3)
    for number, rank in enumerate(ranks):
        rank.marks = marks(number, [(1 + 9 * (number == 2)) * GiB] * 6, name="backward")
    found = compare_ranks(ranks)
    assert (found.groups.mark, [finding.rank for finding in found.findings]) == ("backward", [2])


@pytest.mark.parametrize("full", ["cuda:0", "cuda:1"])
def test_a_rank_is_compared_on_its_fullest_gpu(full):
    ranks = records(2)
    for number, rank in enumerate(ranks):
        on = {
            device: marks(number, [(8 if device == full else 1) * GiB] * 12, device=device)
            for device in ("cuda:0", "cuda:1")
        }
        unread = marks(number, [None], device=full)
        cpu = marks(number, [64 * GiB] * 12, device="cpu")
        rank.marks = [*on["cuda:0"], *on["cuda:1"], *cpu, *unread]
    found = compare_ranks(ranks)
    assert [figures.allocated for figures in found.groups.figures] == [8 * GiB, 8 * GiB]


def test_the_device_is_named_where_all_have_the_same_kind():
    assert compare_ranks(records(3)).groups.device == "cuda"
    mixed = records(3)
    mixed[2].marks = marks(2, [GiB] * 12, device="cpu")
    assert compare_ranks(mixed).groups.device is None


@pytest.mark.parametrize(("killed", "told"), [((1,), [1]), ((0, 1), [0, 1]), ((0, 1, 2), [])])
def test_killed_ranks_stand_out_where_most_were_not(killed, told):
    ranks = records(5)
    for number in killed:
        ranks[number].end, ranks[number].alive = None, False
    found = compare_ranks(ranks)
    assert [outlier.rank for outlier in found.groups.outliers if outlier.killed] == told
    assert found.findings == []
