"""`torch.save` and `torch.load` in a trace: files of the right size, and what reading and writing needs."""

import io
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from memtriage.prediction.host.torch_files import SMALL

COUNT = SMALL // 4 + 1024
"""Numbers of a tensor whose contents are not kept."""


def layer(**options):
    return nn.Linear(COUNT, 1, bias=False, **options)


def saved(device):
    torch.save({"weight": layer().weight, "step": torch.tensor(7)}, "net.pt")
    return os.path.getsize("net.pt") > 4 * COUNT


def loaded(**options):
    def run(device):
        torch.save({"weight": layer().weight, "step": torch.tensor(7), "row": torch.arange(3)}, "net.pt")
        found = torch.load("net.pt", **options)
        return (
            found["step"].item(),
            found["row"].tolist(),
            tuple(found["weight"].shape),
            found["weight"].device.type,
        )

    return run


def read_of_a_mapping(device):
    torch.save([layer().weight, layer().weight], "net.pt")
    first, second = torch.load("net.pt", mmap=True)
    copy = first + 1
    del first, copy
    return second.shape[1]


def mapped_by_configuration(device):
    torch.save(layer().weight, "net.pt")
    from torch.utils.serialization import config

    before, config.load.mmap = config.load.mmap, True
    try:
        kept = torch.load("net.pt")
        real = torch.load("net.pt", mmap=False)
    finally:
        config.load.mmap = before
    return kept.shape == real.shape


def to_memory(device):
    buffer = io.BytesIO(b"")
    buffer.write(b"before")
    torch.save({"weight": layer().weight, "small": torch.ones(2)}, buffer)
    return len(buffer.getvalue()) < SMALL


def from_memory(device):
    buffer = io.BytesIO()
    torch.save({"small": torch.arange(2), "weight": nn.Parameter(torch.ones(4))}, buffer)
    buffer.seek(0)
    found = torch.load(buffer)
    return found["small"].tolist(), tuple(found["weight"].shape)


def to_an_open_file(device):
    with open("net.pt", "wb") as file:
        torch.save(layer().weight, file)
    return os.path.getsize("net.pt") < SMALL


def of_the_gpu(device):
    weight = torch.empty(COUNT, device=device)
    torch.save({"a": weight, "b": weight}, "net.pt")
    host = torch.load("net.pt", map_location="cpu")
    there = torch.load("net.pt", map_location="cuda")
    back = torch.load("net.pt")
    return [found[name].device.type for found in (host, there, back) for name in "ab"]


def views(device):
    table = torch.empty(COUNT, 2)
    torch.save({"column": table[:, 1], "row": table[3:5].t()}, "net.pt")
    found = torch.load("net.pt")
    return [
        (tuple(part.shape), part.stride(), part.storage_offset()) for part in (found["column"], found["row"])
    ]


def storages(device):
    weight = layer().weight.data
    kept = weight.untyped_storage().clone()
    same = weight.untyped_storage().cpu()._cdata == weight.untyped_storage()._cdata
    weight.untyped_storage().resize_(0)
    small = torch.ones(3).untyped_storage().clone()
    stays = kept.to(device="cpu")._cdata == kept._cdata
    moved = small.to(device="cpu")
    return same, stays, kept.nbytes(), list(small)[:4], list(moved) == list(small)


def at_the_limit(device):
    buffer = io.BytesIO()
    torch.save([nn.Parameter(torch.empty(SMALL // 4)), torch.full((SMALL // 4,), 3)], buffer)
    written = len(buffer.getvalue()) > 3 * SMALL
    buffer.seek(0)
    weight, row = torch.load(buffer)
    return written, tuple(weight.shape), row.unique().tolist()


def scripted_by_path(device):
    path = Path("net.pt")
    torch.save(layer().weight, path)
    return tuple(torch.load(path, weights_only=False).shape)


@pytest.mark.parametrize(
    ("run", "gpu", "expected"),
    [
        (
            saved,
            "none",
            (
                True,
                ["+69632 parameter heap", "+8 other tensors heap", "-69632 parameter", "-8 other tensors"],
                [],
            ),
        ),
        (
            loaded(),
            "none",
            (
                (7, [0, 1, 2], (1, 17408), "cpu"),
                [
                    "+69632 parameter heap",
                    "+8 other tensors heap",
                    "+24 other tensors heap",
                    "-69632 parameter",
                    "-8 other tensors",
                    "-24 other tensors",
                    "+69632 parameter heap",
                    "+8 loaded heap",
                    "+24 loaded heap",
                    "-69632 parameter",
                    "-8 loaded",
                    "-24 loaded",
                ],
                [],
            ),
        ),
        (
            loaded(mmap=True),
            "none",
            (
                (7, [0, 1, 2], (1, 17408), "cpu"),
                [
                    "+69632 parameter heap",
                    "+8 other tensors heap",
                    "+24 other tensors heap",
                    "-69632 parameter",
                    "-8 other tensors",
                    "-24 other tensors",
                    "+8 loaded heap",
                    "+24 loaded heap",
                    "-8 loaded",
                    "-24 loaded",
                ],
                [],
            ),
        ),
        (
            read_of_a_mapping,
            "none",
            (
                17408,
                [
                    "+69632 parameter heap",
                    "+69632 parameter heap",
                    "-69632 parameter",
                    "-69632 parameter",
                    "+69632 parameter mapping",
                    "+69632 other tensors heap",
                    "-69632 other tensors",
                    "-69632 parameter",
                ],
                [],
            ),
        ),
        (
            mapped_by_configuration,
            "none",
            (
                True,
                ["+69632 parameter heap", "-69632 parameter", "+69632 parameter heap", "-69632 parameter"],
                [],
            ),
        ),
        (
            to_memory,
            "none",
            (
                True,
                [
                    "+69632 parameter heap",
                    "+8 other tensors heap",
                    "+71461 copies for saving mapping",
                    "-69632 parameter",
                    "-8 other tensors",
                    "-71461 copies for saving",
                ],
                [],
            ),
        ),
        (
            from_memory,
            "none",
            (
                ([0, 1], (4,)),
                [
                    "+16 other tensors heap",
                    "+16 other tensors heap",
                    "+16 parameter heap",
                    "-16 other tensors",
                    "+1893 copies for saving mapping",
                    "-16 other tensors",
                    "-16 parameter",
                    "+16 loaded heap",
                    "+16 loaded heap",
                    "+16 parameter heap",
                    "-16 loaded",
                    "-1893 copies for saving",
                    "-16 loaded",
                    "-16 parameter",
                ],
                [],
            ),
        ),
        (to_an_open_file, "none", (True, ["+69632 parameter heap", "-69632 parameter"], [])),
        (
            of_the_gpu,
            "h200",
            (
                ["cpu", "cpu", "cuda", "cuda", "cuda", "cuda"],
                [
                    "+69632 copies for saving heap",
                    "-69632 copies for saving",
                    "+69632 loaded heap",
                    "+69632 loaded heap",
                    "-69632 loaded",
                    "+69632 loaded heap",
                    "-69632 loaded",
                    "-69632 loaded",
                ],
                [],
            ),
        ),
        (
            views,
            "none",
            ([((17408,), (2,), 1), ((2, 2), (1, 2), 6)], ["+139264 loaded heap", "-139264 loaded"], []),
        ),
        (
            storages,
            "none",
            (
                (True, True, 69632, [0, 0, 128, 63], True),
                [
                    "+69632 parameter heap",
                    "+69632 other tensors heap",
                    "-69632 parameter",
                    "+12 other tensors heap",
                    "+12 other tensors heap",
                    "-12 other tensors",
                    "-69632 other tensors",
                    "-12 other tensors",
                ],
                [],
            ),
        ),
        (
            at_the_limit,
            "none",
            (
                (True, (16384,), [1] * 16384),
                [
                    "+131072 other tensors heap",
                    "+198437 copies for saving mapping",
                    "-131072 other tensors",
                    "+65536 loaded heap",
                    "+65536 parameter heap",
                    "+131072 loaded heap",
                    "-65536 loaded",
                    "+131072 other tensors heap",
                    "-131072 other tensors",
                    "-198437 copies for saving",
                    "-65536 parameter",
                    "-131072 loaded",
                ],
                [
                    "unknown elements are taken as all different",
                    "values copied to the host are taken as 1",
                ],
            ),
        ),
        (
            scripted_by_path,
            "none",
            (
                (1, 17408),
                ["+69632 parameter heap", "-69632 parameter", "+69632 parameter heap", "-69632 parameter"],
                [],
            ),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_files_hold_what_is_saved_without_its_data(host_story, run, gpu, expected):
    answer, story, notes = host_story(run, gpu=gpu)
    assert (answer, story, [note.rpartition(": ")[0] for note in notes]) == expected


def test_a_large_tensor_of_the_host_is_listed_as_ones(host_story):
    answer, _, notes = host_story(lambda device: layer().weight[0, :2].tolist())
    assert answer == [1.0, 1.0]
    assert [note.rpartition(": ")[0] for note in notes] == [
        "large tensors of the host are taken as ones where they are read"
    ]
