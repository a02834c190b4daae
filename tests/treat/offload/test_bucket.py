"""Parameters that go through the ring together, cut into tiles."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from memtriage.treat.offload.bucket import Bucket, RankPart, in_tile, on_device, on_host
from memtriage.treat.offload.pipeline import lane_to
from memtriage.treat.offload.resident import ResidentParameter, settle_in


def bucket_of(
    *sizes: int, ranks: int = 1, rank: int = 0, tile: int = 128, gradients: bool = False,
    dtype: torch.dtype = torch.bfloat16, travels_as: torch.dtype | None = torch.bfloat16,
) -> Bucket:  # fmt: skip
    made = Bucket(0, lane_to(torch.device("cpu")), travels_as)
    for number, size in enumerate(sizes):
        weight = Parameter(torch.full((size,), float(number), dtype=dtype))
        resident = ResidentParameter(weight, f"w{number}", ranks, rank)
        made.residents.append(resident)
        made.weights.append(resident.weights())
    settle_in(made.residents, torch.float32, gradients=gradients)
    made.cut(tile)
    return made


def parts(bucket: Bucket) -> list[tuple[int, list[tuple[int, range, range, range]]]]:
    """Of each tile the elements used, and of each part its parameter and where it is in the three places."""

    def places(part: RankPart) -> tuple[int, range, range, range]:
        return (
            part.index,
            *(range(where.start, where.stop) for where in (part.device, part.host, part.tile)),
        )

    return [(tile.used, [places(part) for part in tile.parts]) for tile in bucket.tiles]


def test_a_parameter_goes_in_as_many_tiles_as_it_needs_and_small_ones_together() -> None:
    assert parts(bucket_of(200, 5, 64)) == [
        (128, [(0, range(128), range(128), range(128))]),
        (128, [(0, range(128, 200), range(128, 200), range(72))]),
        (128, [(1, range(5), range(5), range(5)), (2, range(64), range(64), range(64, 128))]),
    ]


@pytest.mark.parametrize(
    ("rank", "first"), [(0, [(0, range(64)), (1, range(5))]), (1, [(0, range(64, 70))]), (2, [])]
)
def test_a_rank_has_its_run_of_each_parameter_and_maybe_none(
    rank: int, first: list[tuple[int, range]]
) -> None:
    (tile,) = bucket_of(70, 5, ranks=3, rank=rank).tiles
    assert [(part.index, range(part.device.start, part.device.stop)) for part in tile.parts] == first
    assert [(part.host.start, part.tile.start) for part in tile.parts] == [(0, 0), (0, 64)][: len(first)]
    assert tile.used == 128


@pytest.mark.parametrize(
    ("dtype", "travels_as", "count"),
    [
        (torch.bfloat16, torch.bfloat16, 2),
        (torch.bfloat16, torch.float32, 4),
        (torch.float32, torch.bfloat16, 4),
        (torch.bfloat16, None, 2),
        (torch.float32, None, 4),
    ],
)
def test_a_tile_has_fewer_elements_where_the_widest_that_travels_is_wide(
    dtype: torch.dtype, travels_as: torch.dtype | None, count: int
) -> None:
    made = bucket_of(256, dtype=dtype, travels_as=travels_as)
    assert (len(made.tiles), made.weight_dtype) == (count, dtype)


@pytest.mark.parametrize("gradients", [False, True])
def test_what_is_in_a_tile_is_found_on_the_device_on_the_host_and_in_its_buffer(gradients: bool) -> None:
    made = bucket_of(70, 5, tile=192, gradients=gradients)
    first, second = made.residents
    assert [each.data_ptr() for each in made.masters] == [first.master.data_ptr(), second.master.data_ptr()]
    assert [each.data_ptr() for each in made.exp_avgs] == [
        first.exp_avg.data_ptr(), second.exp_avg.data_ptr(),
    ]  # fmt: skip
    assert [each.data_ptr() for each in made.exp_avg_sqs] == [
        first.exp_avg_sq.data_ptr(), second.exp_avg_sq.data_ptr(),
    ]  # fmt: skip
    assert len(made.kept_gradients) == (2 if gradients else 0)
    (tile,) = made.tiles
    assert [each.tolist() for each in on_device(made.weights, tile)] == [[0.0] * 70, [1.0] * 5]
    assert [len(each) for each in on_host(made.masters, tile)] == [70, 5]
    buffer = torch.arange(192)
    assert [(int(each[0]), len(each)) for each in in_tile(buffer, tile)] == [(0, 70), (128, 5)]
    assert (made.reduced, made.gradients, made.group) == (True, [], 0)
