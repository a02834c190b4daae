"""Tiles cover every element once, begin and end where the vectorized kernel allows it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from memtriage.treat.offload.tiles import (
    ALIGNMENT,
    Share,
    aligned,
    capacity,
    is_dense,
    like_parameter,
    local,
    memory_order,
    ordered_as,
    pack,
    room,
)

NUMELS = st.lists(st.integers(0, 3000), min_size=1, max_size=8)
CAPACITIES = st.integers(1, 12).map(lambda units: units * ALIGNMENT)


@given(NUMELS, CAPACITIES, st.integers(1, 5))
def test_all_ranks_together_have_each_element_once(numels: list[int], capacity: int, ranks: int) -> None:
    seen = [[0] * numel for numel in numels]
    for rank in range(ranks):
        shares = [Share(numel, ranks, rank) for numel in numels]
        for tile in pack([share.chunk for share in shares], capacity):
            for piece in tile:
                first, last = shares[piece.index].span(piece.start, piece.stop)
                for element in range(first, last):
                    seen[piece.index][element] += 1
    assert all(count == 1 for parameter in seen for count in parameter)


@given(NUMELS, CAPACITIES, st.integers(1, 5), st.integers(0, 4))
def test_pieces_are_whole_vectors_but_for_a_parameters_end(
    numels: list[int], capacity: int, ranks: int, rank: int
) -> None:
    shares = [Share(numel, ranks, min(rank, ranks - 1)) for numel in numels]
    for tile in pack([share.chunk for share in shares], capacity):
        for piece in tile:
            share = shares[piece.index]
            first, last = share.span(piece.start, piece.stop)
            assert first % ALIGNMENT == 0 or first == share.numel
            assert last % ALIGNMENT == 0 or last == share.numel


@given(NUMELS, CAPACITIES)
def test_pieces_lie_in_their_tile_one_behind_the_other(numels: list[int], capacity: int) -> None:
    tiles = list(pack([aligned(numel) for numel in numels], capacity))
    for tile in tiles:
        assert [piece.at for piece in tile] == [0, *(piece.end for piece in tile[:-1])]
        assert tile[-1].end <= capacity
    assert all(tile[-1].end == capacity for tile in tiles[:-1])


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_the_shares_lengths_sum_to_the_parameter(numel: int, ranks: int) -> None:
    shares = [Share(numel, ranks, rank) for rank in range(ranks)]
    assert sum(share.length for share in shares) == numel
    assert all(share.length <= share.chunk for share in shares)


def test_room_of_a_tile_is_that_of_one_wide_block_at_least() -> None:
    assert (room(64), room(4096)) == (64 * 4, 4096 * 2)


def test_the_alignment_is_a_cache_line_of_narrow_and_four_of_wide_elements() -> None:
    assert (ALIGNMENT, room(128), room(127)) == (64, 256, 256)
    assert capacity(4096, 4) == 2048 and capacity(192, 4) == 64 and capacity(64, 4) == 64


def test_tiles_of_two_parameters() -> None:
    tiles = list(pack([64, 0, 192], 128))
    assert [[(piece.index, piece.start, piece.stop, piece.at) for piece in tile] for tile in tiles] == [
        [(0, 0, 64, 0), (2, 0, 64, 64)],
        [(2, 64, 192, 0)],
    ]


def test_shares_of_a_parameter_too_small_for_all_ranks() -> None:
    shares = [Share(100, 3, rank) for rank in range(3)]
    assert [(share.chunk, share.length) for share in shares] == [(64, 64), (64, 36), (64, 0)]
    assert shares[0].span(0, 64, rank=1) == (64, 100)


def test_dense_tensors_in_the_order_of_memory() -> None:
    rows = torch.arange(6.0).reshape(2, 3)
    assert is_dense(rows) and is_dense(rows.t()) and not is_dense(rows[:, :2])
    assert memory_order(rows.t()).tolist() == rows.flatten().tolist()
    assert ordered_as(rows, rows).data_ptr() == rows.data_ptr()
    assert ordered_as(rows.t(), rows.t().contiguous()).tolist() == rows.t().flatten().tolist()


def test_the_local_part_of_a_plain_tensor_is_detached() -> None:
    weight = torch.ones(3, requires_grad=True)
    assert not local(weight).requires_grad and local(weight).data_ptr() == weight.data_ptr()
    assert like_parameter(rows := torch.ones(3), weight) is rows
