"""Equal ranks are found without tracing each of them, and those that differ are."""

import pytest

from memtriage.model.prediction import Prediction
from memtriage.prediction.distributed.ranks import all_ranks


def prediction(reserved, activation=0):
    return Prediction(
        peak_allocated=reserved // 2,
        peak_reserved=reserved,
        peak_phase="backward",
        by_owner={"parameter": 100, "activation": activation},
        outside_allocator=0,
        steps=[],
        seconds=0.0,
        notes=[],
    )


def grouped(world_size, reserved_of):
    asked = []

    def predict(rank):
        asked.append(rank)
        return prediction(reserved_of(rank), reserved_of(rank) - 100)

    largest = all_ranks(world_size, predict)
    assert len(asked) == len(set(asked))
    return largest, {tuple(group.ranks): group.peak_reserved for group in largest.ranks}, asked


def test_equal_ranks_are_one_group_after_few_traces():
    found, groups, asked = grouped(1024, lambda rank: 1000)
    assert groups == {tuple(range(1024)): 1000}
    assert len(asked) <= 12
    assert "all 1024 ranks have the same peaks" in found.notes[-1]


@pytest.mark.parametrize(
    ("world", "reserved_of", "groups", "traced"),
    [
        (7, lambda rank: 900 if rank == 6 else 1000, {(0, 1, 2, 3, 4, 5): 1000, (6,): 900}, None),
        (8, lambda rank: 900 if rank == 7 else 1000, {tuple(range(7)): 1000, (7,): 900}, None),
        # Each binary digit of a rank is tried, and the last rank.
        (8, lambda rank: 1000, {tuple(range(8)): 1000}, [0, 1, 2, 4, 7]),
        (8, lambda rank: 1000 + 10 * (rank & 2), {(2, 3, 6, 7): 1020, (0, 1, 4, 5): 1000}, [0, 1, 2, 4, 7]),
    ],
)
def test_few_ranks_are_traced_to_find_those_that_differ(world, reserved_of, groups, traced):
    _, found, asked = grouped(world, reserved_of)
    assert found == groups
    assert traced in (None, sorted(asked))


def test_too_many_ranks_that_differ_are_refused():
    with pytest.raises(ValueError, match="may differ"):
        all_ranks(512, lambda rank: prediction(rank + 1))


def test_ranks_are_ordered_by_what_they_reserve_then_by_what_they_allocate():
    def predict(rank):
        made = prediction(1000)
        made.peak_allocated, made.peak_reserved = {0: (400, 1000), 1: (500, 1000), 2: (300, 2000)}[rank]
        return made

    assert [group.ranks for group in all_ranks(3, predict).ranks] == [[2], [1], [0]]


def test_the_note_names_what_the_largest_rank_has_more_of():
    found, _, asked = grouped(3, lambda rank: 4096 + 1024 * (rank == 1))
    assert len(asked) == 3
    assert found.notes[-1] == (
        "rank 1 reserve most, 1.0 KiB more than ranks 0, 2, most of it activation (1.0 KiB); 3 of 3 ranks "
        "were traced"
    )


def test_256_ranks_that_differ_are_traced():
    assert len(all_ranks(256, lambda rank: prediction(rank + 1)).ranks) == 256
