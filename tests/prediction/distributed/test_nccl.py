"""What NCCL holds outside the allocator, and what is said of it."""

import pytest

from memtriage.prediction.distributed.nccl import notes, outside

MIB = 1 << 20
HOLDS = (
    "NCCL is taken to hold 377.0 MiB outside the allocator and 485.0 MiB more for each communicator, of "
    "which there {}: measured on two H200s of one host; more ranks, another network or another version may "
    "take more"
)
BUCKET = (
    "DDP's bucket of the first step (25.0 MiB) is assumed to stay into the second, next to those that "
    "replace it: NCCL's watchdog decides, so a real rank may free it sooner or later"
)
ALONE = "world_size={}, but the ranks do not communicate: each is predicted alone"


ONE_RANK = (
    "NCCL is taken to hold 560.0 MiB outside the allocator for 1 communicator of one rank: measured on an "
    "H200"
)


@pytest.mark.parametrize(
    ("communicators", "held"),
    [
        ([], 0),
        ([2], 862),
        ([8, 2], 862 + 485),
        ([2, 2, 2], 862 + 970),
        ([1], 560),
        ([1, 1, 1], 560 + 2 * 389),
        ([1, 2], 862 + 389),
    ],
)
def test_the_first_communicator_brings_the_library(communicators, held):
    assert outside(communicators) == held * MIB


@pytest.mark.parametrize(
    ("world", "communicators", "held", "said"),
    [
        (1, [], 0, []),
        (2, [], 0, [ALONE.format(2)]),
        (8, [], 5, [ALONE.format(8)]),
        (8, [1], 0, [ALONE.format(8)]),
        (1, [1], 0, [ONE_RANK]),
        (2, [2, 1], 0, [HOLDS.format("is 1")]),
        (4, [4, 2, 2], 25 * MIB, [HOLDS.format("are 3"), BUCKET]),
    ],
)
def test_what_is_assumed_is_said(world, communicators, held, said):
    assert notes(world, communicators, held) == said
