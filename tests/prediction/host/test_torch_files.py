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
    ("run", "gpu", "answer", "mapped"),
    [
        (saved, "none", True, set()),
        (loaded(), "none", (7, [0, 1, 2], (1, COUNT), "cpu"), set()),
        (loaded(mmap=True), "none", (7, [0, 1, 2], (1, COUNT), "cpu"), set()),
        (read_of_a_mapping, "none", COUNT, {"parameter"}),
        (mapped_by_configuration, "none", True, set()),
        (to_memory, "none", True, {"copies for saving"}),
        (from_memory, "none", ([0, 1], (4,)), {"copies for saving"}),
        (to_an_open_file, "none", True, set()),
        (of_the_gpu, "h200", ["cpu", "cpu", "cuda", "cuda", "cuda", "cuda"], set()),
        (views, "none", [((COUNT,), (2,), 1), ((2, 2), (1, 2), 6)], set()),
        (storages, "none", (True, True, 4 * COUNT, [0, 0, 128, 63], True), set()),
        (at_the_limit, "none", (True, (SMALL // 4,), [1] * (SMALL // 4)), {"copies for saving"}),
        (scripted_by_path, "none", (1, COUNT), set()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_files_hold_what_is_saved_without_its_data(host_story, run, gpu, answer, mapped):
    """What is made is freed; a file that is mapped takes room where it is read, a file in memory where it is
    written."""
    found, story, _ = host_story(run, gpu=gpu)
    assert found == answer
    made = [line[1:].rsplit(" ", 1) for line in story if line[0] == "+"]
    assert sorted(line[1:] for line in story if line[0] == "-") == sorted(block for block, _ in made)
    assert {block.partition(" ")[2] for block, place in made if place == "mapping"} == mapped


@pytest.mark.parametrize(("options", "times"), [({}, 2), ({"mmap": True}, 1), ({"mmap": False}, 2)], ids=str)
def test_a_file_that_is_mapped_takes_no_memory_of_its_own(host_story, options, times):
    """The first time is that of the tensors that were saved."""
    _, story, _ = host_story(loaded(**options))
    assert story.count(f"+{4 * COUNT} parameter heap") == times


def test_what_two_names_share_is_copied_from_the_device_once(host_story):
    _, story, _ = host_story(of_the_gpu, gpu="h200")
    assert [line for line in story if "saving" in line] == [
        f"+{4 * COUNT} copies for saving heap", f"-{4 * COUNT} copies for saving",
    ]  # fmt: skip


def test_a_large_tensor_of_the_host_is_listed_as_ones(host_story):
    answer, _, notes = host_story(lambda device: layer().weight[0, :2].tolist())
    assert answer == [1.0, 1.0]
    assert [note.rpartition(": ")[0] for note in notes] == [
        "large tensors of the host are taken as ones where they are read"
    ]
