"""Tiles cover every element once, begin and end where the vectorized kernel allows it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memtriage.treat.offload.tiles import (
    ALIGNMENT,
    Share,
    aligned,
    pack,
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
