"""Operators whose results depend on data: the program's own values are followed, others get a default."""

import pytest
import torch
from torch.nn import functional

from memtriage.prediction.values import INTEGER_LIMIT
from support.traced import traced


def noted(notes):
    """The notes, without the place of the program."""
    return [note.rpartition(": ")[0] for note in notes]


def unknown(device, *shape, dtype=torch.float32):
    """A tensor of which no value is known."""
    return torch.empty(shape, device=device, dtype=dtype)


def known(device, *values, dtype=None):
    """A tensor whose values the program has set."""
    return torch.tensor(values, dtype=dtype, device=device)


def seen(*tensors):
    """What the program sees of tensors of the device: their values, where they are known."""
    return [tensor.tolist() for tensor in tensors]


def shaped(*tensors):
    return [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]


ALL_TRUE = ["every element of an unknown mask is taken as true"]
DIFFERENT = ["unknown elements are taken as all different"]
LOOKS = {
    "a number": (lambda d: known(d, 7)[0].item(), (7, "_to_copy 8", [])),
    "an unknown number": (
        lambda d: str(unknown(d, 1).item()),
        ("1.0", "empty 4", ["an unknown number is taken as 1"]),
    ),
    "an unknown condition": (
        lambda d: bool(unknown(d, 1, dtype=torch.bool)),
        (False, "empty 1", ["a condition on unknown values is taken as False"]),
    ),
    "equal": (lambda d: torch.equal(known(d, 1, 2), known(d, 1, 2)), (True, "_to_copy 16, _to_copy 16", [])),
    "not equal": (
        lambda d: torch.equal(known(d, 1, 2), known(d, 1, 3)),
        (False, "_to_copy 16, _to_copy 16", []),
    ),
    "perhaps equal": (
        lambda d: torch.equal(unknown(d, 2), unknown(d, 2)),
        (False, "empty 8, empty 8", ["tensors compared as a whole are taken as different"]),
    ),
    "nonzero": (
        lambda d: seen(known(d, [0, 4], [5, 6]).nonzero()),
        ([[[0, 1], [1, 0], [1, 1]]], "_to_copy 32, nonzero 48", []),
    ),
    "nonzero of unknown": (
        lambda d: shaped(unknown(d, 3, 2).nonzero()),
        ([((6, 2), "int64")], "empty 24, nonzero 96", ALL_TRUE),
    ),
    "selected": (
        lambda d: shaped(unknown(d, 2, 3).masked_select(known(d, True, False, True))),
        ([((4,), "float32")], "empty 24, _to_copy 3, masked_select 16", []),
    ),
    "selected by unknown": (
        lambda d: shaped(unknown(d, 3).masked_select(unknown(d, 2, 1, dtype=torch.bool))),
        ([((6,), "float32")], "empty 12, empty 2, masked_select 24", ALL_TRUE),
    ),
    "rows": (
        lambda d: shaped(unknown(d, 3, 5)[known(d, True, False, True)]),
        ([((2, 5), "float32")], "empty 60, _to_copy 3, nonzero 16, index 40", []),
    ),
    "bytes": (
        lambda d: shaped(unknown(d, 3, 5)[known(d, 1, 0, 0, dtype=torch.uint8)]),
        ([((1, 5), "float32")], "empty 60, _to_copy 3, nonzero 8, index 20", []),
    ),
    "columns": (
        lambda d: shaped(unknown(d, 3, 5)[:, unknown(d, 5, dtype=torch.bool)]),
        ([((3, 5), "float32")], "empty 60, empty 5, nonzero 40, index 60", ALL_TRUE),
    ),
    "by position": (
        lambda d: shaped(unknown(d, 3, 5)[known(d, 2, 0, 0, 1)]),
        ([((4, 5), "float32")], "empty 60, _to_copy 32, index 80", []),
    ),
    "unique": (
        lambda d: seen(*known(d, 5, 2, 5).unique(return_inverse=True, return_counts=True)),
        ([[2, 5], [1, 0, 1], [1, 2]], "_to_copy 24, _unique2 16, _unique2 24, _unique2 16", []),
    ),
    "unique of unknown": (
        lambda d: shaped(*unknown(d, 2, 3).unique(return_inverse=True, return_counts=True)),
        (
            [((6,), "float32"), ((2, 3), "int64"), ((6,), "int64")],
            "empty 24, _unique2 24, _unique2 48, _unique2 48",
            DIFFERENT,
        ),
    ),
    "runs": (
        lambda d: seen(*known(d, 5, 5, 2, 5).unique_consecutive(return_counts=True)),
        ([[5, 2, 5], [2, 1, 1]], "_to_copy 32, unique_consecutive 24, unique_consecutive 24", []),
    ),
    "unique rows": (
        lambda d: seen(known(d, [1, 2], [1, 2], [0, 3]).unique(dim=0)),
        ([[[0, 3], [1, 2]]], "_to_copy 48, unique_dim 32, unique_dim 24, unique_dim 16", []),
    ),
    "unique unknown rows": (
        lambda d: shaped(unknown(d, 3, 2).unique(dim=0)),
        ([((3, 2), "float32")], "empty 24, unique_dim 24, unique_dim 24, unique_dim 24", DIFFERENT),
    ),
    "repeats": (
        lambda d: seen(torch.repeat_interleave(known(d, 0, 2, 1))),
        ([[1, 1, 2]], "_to_copy 24, repeat_interleave 24", []),
    ),
    "unknown repeats": (
        lambda d: shaped(torch.repeat_interleave(unknown(d, 3, dtype=torch.int64))),
        ([((3,), "int64")], "empty 24, repeat_interleave 24", ["unknown repeats are taken as 1 each"]),
    ),
    "repeats of a stated sum": (
        lambda d: shaped(torch.repeat_interleave(unknown(d, 3, dtype=torch.int64), output_size=7)),
        ([((7,), "int64")], "empty 24, repeat_interleave 56", []),
    ),
    "counts": (
        lambda d: seen(known(d, 0, 3, 3).bincount()),
        ([[1, 0, 0, 2]], "_to_copy 24, bincount 32", []),
    ),
    "counts of at least": (
        lambda d: seen(known(d, 0, 1).bincount(minlength=4), known(d, 0).bincount(None, 2)),
        ([[1, 1, 0, 0], [1, 0]], "_to_copy 16, bincount 32, _to_copy 8, bincount 16", []),
    ),
    "weighed counts": (
        lambda d: shaped(known(d, 0, 3).bincount(unknown(d, 2))),
        ([((4,), "float32")], "_to_copy 16, empty 8, bincount 16", []),
    ),
    "unknown counts": (
        lambda d: shaped(unknown(d, 9, dtype=torch.int64).bincount()),
        (
            [((1,), "int64")],
            "empty 72, bincount 8",
            ["unknown numbers that are counted are taken as less than 1"],
        ),
    ),
    "with a host's mask": (
        lambda d: shaped(unknown(d, 3)[torch.tensor([True, False, False])]),
        ([((1,), "float32")], "empty 12, nonzero 8, index 4", []),
    ),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_result_has_the_size_that_the_data_makes(name):
    look, expected = LOOKS[name]
    run = traced(look)
    assert (run.answer, run.made, noted(run.notes)) == expected


def loss(batched=True, lengths="host", backward=False):
    """A CTC loss of 12 frames, 5 letters, and 3 targets, the longest of 4 letters."""

    def run(device):
        shape = (12, 3, 5) if batched else (12, 5)
        frames = torch.empty(shape, device=device, requires_grad=True)
        targets = torch.empty((3, 6) if batched else (6,), dtype=torch.int64, device=device)
        sizes, long = ([12, 12, 12], [2, 4, 1]) if batched else ([12], [4])
        if lengths != "host":
            sizes = torch.tensor(sizes, device=device)
            long = torch.tensor(long, device=device) if lengths == "device" else torch.empty_like(sizes)
        result = functional.ctc_loss(frames, targets, tuple(sizes) if lengths == "host" else sizes, long)
        if backward:
            result.backward()
        return tuple(result.shape)

    return run


@pytest.mark.parametrize(
    ("arguments", "samples", "longest"),
    [
        ({}, 3, 4),
        ({"lengths": "device", "backward": True}, 3, 4),
        ({"lengths": "unknown"}, 3, 6),  # as many as there is room for
        ({"batched": False}, 1, 4),
    ],
    ids=["on the host", "on the device", "unknown", "one target"],
)
def test_a_ctc_loss_keeps_twice_the_longest_target(arguments, samples, longest):
    run = traced(loss(**arguments))
    assert (run.answer, noted(run.notes)) == ((), [])
    kept = samples * 12 * (2 * longest + 1) * 4
    made = [each for each in run.made.split(", ") if each.startswith("_ctc_loss")]
    backward = ["_ctc_loss_backward 720"] * arguments.get("backward", False)
    assert made == [f"_ctc_loss {samples * 4}", f"_ctc_loss {kept}", *backward]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x[i],
        lambda x, i: x.gather(0, i[:, None].expand(-1, 8)),
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.take(i),
        lambda x, i: x.masked_select(x.detach().bool()),
        lambda x, i: x.max(1).values,
    ],
    ids=["index", "gather", "index_select", "take", "masked_select", "max"],
)
def test_a_gradient_is_written_into_the_zeros_that_were_made_for_it(function):
    def run(device):
        rows = torch.empty(16, 8, device=device, requires_grad=True)
        function(rows, torch.arange(4, device=device)).sum().backward()

    _, backward = traced(run).made.split("ones_like 4, ")
    zeros, *others = backward.split(", ")
    assert zeros in ("new_zeros 512", "zeros_like 512")
    assert all(each.endswith("workspace") for each in others)


@pytest.mark.parametrize(
    ("rows", "shifts", "dims", "expected"),
    [
        (lambda device: torch.empty(4, 8, device=device), 1, 0, ("empty 128, roll 128", 256)),
        (lambda device: torch.empty(4, 8, device=device), 1, None, ("empty 128, roll 128", 256)),
        (
            lambda device: torch.empty(4, 8, device=device),
            (1, 2, 1),
            (0, 1, 0),
            ("empty 128, roll 128, roll 128, roll 128", 512),
        ),
        (
            lambda device: torch.empty(8, 4, device=device).t(),
            (1, 2),
            (0, 1),
            ("empty 128, roll 128 workspace, roll 128, roll 128", 384),
        ),
    ],
    ids=["one dimension", "all as one", "three", "turned"],
)
def test_each_dimension_is_rolled_into_another_tensor(rows, shifts, dims, expected):
    run = traced(lambda device: rows(device).roll(shifts, dims).shape)
    assert (run.answer, (run.made, run.most)) == ((4, 8), expected)


def test_known_values_are_rolled():
    run = traced(lambda device: known(device, [1, 2], [3, 4]).roll((1, 1), (0, 1)).tolist())
    assert run.answer == [[4, 3], [2, 1]]


def test_a_program_that_writes_out_of_place_gets_another_tensor():
    def run(device):
        places = torch.arange(4, device=device)
        with torch.no_grad():
            torch.zeros(16, 8, device=device).index_add(0, places, torch.empty(4, 8, device=device))

    assert traced(run).made == "arange 32, zeros 512, empty 128, index_add 512"


def test_a_gradient_that_is_kept_in_backward_is_not_written_to():
    """Only the newest zeros are the formula's own."""

    class Scattered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return rows.clone()

        @staticmethod
        def backward(ctx, gradient):
            table = torch.zeros_like(gradient)
            places = torch.arange(4, device=gradient.device)
            return table.index_add(0, places, gradient[:4])

    def run(device):
        Scattered.apply(torch.empty(16, 8, device=device, requires_grad=True)).sum().backward()

    made = traced(run).made
    assert made == "empty 512, clone 512, sum 4, ones_like 4, zeros_like 512, arange 32, index_add 512"


def test_a_gradient_scaler_finds_everything_finite():
    def run(device):
        weight = torch.ones(4, device=device, requires_grad=True)
        optimizer = torch.optim.SGD([weight])
        scaler = torch.amp.GradScaler(device.type)
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), weight.grad.tolist()

    run = traced(run)
    assert (run.answer, noted(run.notes)) == (
        (65536.0, [1.0, 1.0, 1.0, 1.0]),
        ["values copied to the host are taken as 1"],
    )


@pytest.mark.parametrize(("count", "followed"), [(INTEGER_LIMIT, True), (INTEGER_LIMIT + 1, False)])
def test_values_of_large_tensors_are_not_followed(count, followed):
    def run(device):
        return torch.zeros(count, dtype=torch.int8, device=device).any().item()

    assert (noted(traced(run).notes) == []) is followed
