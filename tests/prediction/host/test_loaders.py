"""Workers of a DataLoader: the objects that they copy, and the batches that wait."""

import sys
import types

import numpy as np
import pytest
import torch

from memtriage.prediction.host.loaders import objects_size

SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Rows(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.zeros(1000), index, "name"

class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(1000)] * 40)

def main():
    for _ in range(2):
        for batch in DataLoader({data}, batch_size=4, {options}):
            pass

if __name__ == "__main__":
    main()
"""
BATCH = 4 * (1000 * 4 + 8)


@pytest.mark.parametrize(
    ("data", "options", "waiting"),
    [
        ("Rows()", "num_workers=2", 5 * BATCH),  # two ahead for each worker, and the one in use
        ("Rows()", "num_workers=1, prefetch_factor=4", 5 * BATCH),
        ("Rows()", "num_workers=2, prefetch_factor=30", 10 * BATCH),  # all that there are
        ("Stream()", "num_workers=2, prefetch_factor=3", 7 * 4 * 4000),
        ("Rows()", "num_workers=0", None),
        ("Rows()", "num_workers=0, pin_memory=True", None),
    ],
)
def test_as_many_batches_wait_as_are_asked_for(host_of, data, options, waiting):
    host = host_of(SCRIPT.format(data=data, options=options)).host
    assert host.get("batches in shared memory") == waiting
    assert ("workers" in host) is (waiting is not None) and "pinned" not in host


def test_pinned_batches_are_there_twice(host_of):
    pinned = host_of(SCRIPT.format(data="Rows()", options="pin_memory=True"), gpu="h200").host["pinned"]
    assert 1 << 15 <= pinned < (1 << 15) + 1024  # two of 16,032 bytes, and small ones


@pytest.mark.parametrize(("data", "there"), [("Rows()", 1), ("[torch.zeros(1000)] * 40", 2)])
def test_each_data_set_has_its_objects_wherever_it_is(host_of, data, there):
    """The second one, of which more waits, may get the address of the first. A list stays until the end."""
    text = SCRIPT.format(data=data, options="num_workers=2")
    text = text.replace("for _ in range(2)", "for n in (1, 3)").replace("batch_size=4", "batch_size=4 * n")
    host = host_of(text).host
    assert host["workers"] == 2 * (10_000 + host["Python objects"] // there)
    assert host["Python objects"] > 0


def test_the_notes_say_what_is_not_known(host_of, monkeypatch):
    monkeypatch.setattr("memtriage.prediction.host.loaders.measure_worker", lambda forked: None)
    predicted = host_of(SCRIPT.format(data="Rows()", options="num_workers=2"))
    assert predicted.host["workers"] == 2 * predicted.host["Python objects"]
    said = [note for note in predicted.notes if "worker" in note]
    assert said == [
        "what a worker needs could not be measured: only its data set counts",
        "each worker is taken to read the whole data set, and so to copy all its Python objects",
    ]


class Slots:
    __slots__ = ("held",)


def holding(value):
    made = Slots()
    made.held = value
    return made


def rounded(*sizes):
    return sum(-(-size // 16) * 16 for size in sizes)


TEXT = "x" * 1000
SHARED = [TEXT]


@pytest.mark.parametrize(
    ("root", "others"),
    [
        (TEXT, []),
        ([TEXT], [TEXT]),
        ((TEXT, 5.5), [TEXT, 5.5]),
        ({"key": TEXT}, ["key", TEXT]),
        ({1: TEXT, "key": 2.5}, [1, TEXT, "key", 2.5]),
        ([SHARED, SHARED, (SHARED,)], [SHARED, TEXT, (SHARED,)]),
        ([len, sys, Slots, lambda: TEXT], []),
        ([1.5, [2.5, [3.5]]], [1.5, [2.5, [3.5]], 2.5, [3.5], 3.5]),
    ],
    ids=["text", "list", "tuple", "dict", "mixed dict", "shared", "code", "nested"],
)
def test_objects_are_counted_once_with_all_that_they_lead_to(root, others):
    assert objects_size(root) == rounded(*map(sys.getsizeof, (root, *others)))


def test_data_of_arrays_and_tensors_is_not_counted():
    array, tensor = np.zeros(10_000), torch.zeros(10_000)
    assert objects_size(array) == rounded(object.__sizeof__(array))
    assert objects_size(tensor) < 1000 and objects_size(tensor.untyped_storage()) < 1000
    assert objects_size(holding(array)) - objects_size(holding(0.5)) == rounded(
        object.__sizeof__(array)
    ) - rounded(sys.getsizeof(0.5))
    frame = sys._getframe()
    assert isinstance(frame, types.FrameType) and objects_size([frame]) == rounded(sys.getsizeof([frame]))
