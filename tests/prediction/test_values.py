"""Values of the program's own are followed; those of the network get a stated default."""

import pytest
import torch
from torch import nn

from memtriage.prediction.values import FLOAT_LIMIT, INTEGER_LIMIT, KnownValues
from support.traced import traced

aten = torch.ops.aten
CUDA = {"device": torch.device("cuda")}


def looked_at(look):
    """What `look(device, hidden)` returns inside a step, and the notes."""

    def run(device):
        hidden = nn.Linear(512, 512).to(device)(torch.randn(512, 512, device=device))
        return look(device, hidden)

    run = traced(run)
    return run.answer, run.notes


KNOWN = {
    "a mask of ones": (lambda device, hidden: torch.ones(4, 8, device=device).all().item(), True),
    "a changed view": (lambda device, hidden: changed_view(device), [[0, 0], [7, 7]]),
    "what a mask leaves": (lambda device, hidden: left_by_a_mask(device), (3,)),
    "the sum of nothing": (lambda device, hidden: hidden[:0].long().sum().item(), 0),
    "a copied batch": (lambda device, hidden: torch.tensor([4, 2]).to(device).cpu().tolist(), [4, 2]),
    "whether all is finite": (lambda device, hidden: bool(torch.isfinite(hidden).all()), True),
    "whether something is not": (lambda device, hidden: bool(torch.isnan(hidden).any()), False),
}


def changed_view(device):
    table = torch.zeros(2, 2, dtype=torch.long, device=device)
    table[1] += 7
    return table.tolist()


def left_by_a_mask(device):
    row = torch.arange(6, device=device)
    return tuple(row[row > 2].shape)


@pytest.mark.parametrize("name", KNOWN)
def test_a_value_of_the_program_is_known(name):
    look, expected = KNOWN[name]
    assert looked_at(look) == (expected, [])


def test_random_labels_are_within_their_range():
    drawn, notes = looked_at(
        lambda device, hidden: torch.randint(5, 9, (64,), device=device).unique().tolist()
    )
    assert set(drawn) <= {5, 6, 7, 8} and len(drawn) > 1
    assert notes == []


def test_a_value_of_the_network_is_a_stated_default():
    found, (note,) = looked_at(lambda device, hidden: hidden[0].cpu().tolist())
    assert found == [1.0] * 512
    assert "copied to the host" in note and "test_values.py:" in note


def test_large_host_tensor_stays_on_the_host_when_written_to():
    def run(device):
        host = torch.empty(1 << 28, dtype=torch.uint8)
        host[: 1 << 20].copy_(torch.ones(1 << 20, dtype=torch.uint8, device=device))
        assert host[:4].is_cpu

    assert traced(run).most < 1 << 28


def test_draws_repeat_and_leave_the_programs_generator_as_it_is():
    def drawn(values):
        return [values.compute(aten.randint.low, (0, 1000, [8]), dict(CUDA)).tolist() for _ in range(2)]

    before = torch.get_rng_state()
    first, second = drawn(KnownValues())
    assert torch.equal(torch.get_rng_state(), before)
    assert first != second and drawn(KnownValues()) == [first, second]


def test_values_are_known_by_storage_until_it_is_gone():
    values, table = KnownValues(), torch.zeros(3, 2).t()
    assert values.of(table) is None
    values.note(table, torch.arange(6.0).view(2, 3))
    assert values.of(table).tolist() == [[0, 1, 2], [3, 4, 5]]
    values.of(table[1]).fill_(9)
    assert values.of(table[:, 1:]).tolist() == [[1, 2], [9, 9]]
    values.forget(table.untyped_storage()._cdata)
    assert values.of(table) is None


@pytest.mark.parametrize(
    ("tensor", "followed"),
    [
        (torch.zeros(FLOAT_LIMIT), True),
        (torch.zeros(FLOAT_LIMIT + 1), False),
        (torch.zeros(FLOAT_LIMIT + 1, dtype=torch.int8), True),
        (torch.zeros(INTEGER_LIMIT + 1, dtype=torch.bool), False),
        (torch.zeros(0), True),  # without a value, nothing is unknown
        (torch.zeros(4)[1:], False),
        (torch.zeros(1).expand(4), False),
    ],
    ids=["float", "large float", "integer", "large integer", "empty", "a part", "expanded"],
)
def test_small_tensors_that_have_their_storage_for_themselves_are_followed(tensor, followed):
    values = KnownValues()
    values.note(tensor, torch.zeros_like(tensor))
    assert (values.of(tensor) is not None) is followed


def test_what_is_only_made_room_for_has_no_values():
    values = KnownValues()
    assert values.compute(aten.empty.memory_format, ([3],), dict(CUDA)) is None
    assert values.compute(aten.zeros.default, ([3],), dict(CUDA)).tolist() == [0, 0, 0]
    assert values.compute(aten.mm.default, (torch.ones(2), torch.ones(2)), {}) is None  # the host refuses
