"""The partition over a process group, of one rank here; `test_partition.py` has several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import Parameter

from memtriage.treat.offload.exchange import Exchange
from memtriage.treat.offload.pipeline import lane_to
from memtriage.treat.offload.resident import ResidentParameter
from memtriage.treat.offload.tiles import pack
from support.offload import (
    group_of_one,
)

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[torch.distributed.ProcessGroup]:
    with group_of_one() as made:
        yield made


def test_ranks_agree_where_any_has_a_flag(group: torch.distributed.ProcessGroup) -> None:
    exchange = Exchange(group, 128)
    assert (exchange.ranks, exchange.rank, exchange.group) == (1, 0, group)
    assert exchange.agree([True, False, True], CPU) == [True, False, True]
    assert exchange.agree([], CPU) == []


def test_pieces_of_a_tile_are_summed_and_spread(group: torch.distributed.ProcessGroup) -> None:
    lane, sizes = lane_to(CPU), (70, 5)
    exchange = Exchange(group, 256)
    residents = [ResidentParameter(Parameter(torch.zeros(size)), str(size), 1, 0) for size in sizes]
    gradients = [torch.arange(float(size)) + 1 for size in sizes]
    (pieces,) = pack([resident.share.chunk for resident in residents], 256)
    mine = exchange.reduce(lane, pieces, residents, gradients)
    expected = torch.zeros(192)
    expected[:70], expected[128:133] = gradients[0], gradients[1]
    assert torch.equal(mine, expected)
    again = exchange.reduce(lane, pieces, residents, [torch.zeros(size) for size in sizes])
    assert not again.any()
    assert again.data_ptr() == mine.data_ptr()
    own = exchange.room_to_send(lane, torch.float32)
    assert own.numel() == 256
    assert own.data_ptr() not in (mine.data_ptr(), exchange.room_to_send(lane, torch.bfloat16).data_ptr())
    own[:192] = expected * 2
    targets = [torch.zeros(size) for size in sizes]
    exchange.spread(lane, pieces, residents, own, targets)
    assert [torch.equal(each, 2 * gradient) for each, gradient in zip(targets, gradients, strict=True)] == [
        True, True,
    ]  # fmt: skip
    assert exchange.gather(lane, own[:10]).tolist() == [(expected * 2)[:10].tolist()]
    before = exchange.room_to_send(lane, torch.float32)
    exchange.close()
    assert exchange.room_to_send(lane, torch.float32) is not before


def test_a_parameter_of_several_tiles_goes_through_tile_by_tile(
    group: torch.distributed.ProcessGroup,
) -> None:
    lane, exchange = lane_to(CPU), Exchange(group, 128)
    residents = [ResidentParameter(Parameter(torch.zeros(300)), "w", 1, 0)]
    gradient, target = torch.arange(300.0), torch.full((300,), -1.0)
    summed = []
    for pieces in pack([residents[0].share.chunk], 128):
        mine = exchange.reduce(lane, pieces, residents, [gradient])
        summed.append(mine.clone())
        own = exchange.room_to_send(lane, torch.float32)
        own[: len(mine)] = mine
        exchange.spread(lane, pieces, residents, own, [target])
    assert [len(each) for each in summed] == [128, 128, 64]
    assert torch.equal(torch.cat(summed)[:300], gradient)
    assert torch.equal(target, gradient)
