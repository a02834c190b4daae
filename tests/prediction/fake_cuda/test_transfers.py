"""Storages and copies that bypass the dispatcher."""

import io

import pytest
import torch
from torch import nn
from torch.nn.parallel import comm

import memtriage
from support.traced import traced
from support.training import training


@pytest.mark.parametrize(
    "place", ["cuda", "cuda:0", torch.device("cuda"), None, lambda storage, _: storage.cuda()]
)
def test_checkpoints_are_loaded_to_the_device(place, tmp_path):
    file = tmp_path / "model.pt"
    weights = nn.Linear(512, 512)
    tied = {"a": weights.weight, "b": weights.weight, "step": torch.tensor(7)}
    if place is not None:
        torch.save(tied, file)

    def build(device):
        model = nn.Linear(512, 512, bias=False).to(device)
        if place is None:  # saved from the device, so loaded to it
            torch.save({"a": model.weight, "b": model.weight, "step": torch.tensor(7, device=device)}, file)
        before = torch.cuda.memory_allocated()
        loaded = torch.load(file, map_location=place)
        assert torch.cuda.memory_allocated() - before == 512 * 512 * 4 + 512
        assert {tensor.device for tensor in loaded.values()} == {torch.device("cuda", 0)}
        assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
        if place is not None:
            assert loaded["step"].item() == 7
        model.load_state_dict({"weight": loaded["a"]})
        return model, torch.optim.SGD(model.parameters()), lambda: None

    memtriage.predict(build, steps=1)


def test_data_parallel_on_one_device():
    def build(device):
        model = nn.DataParallel(nn.Linear(64, 64)).cuda()
        assert model.device_ids == [0]
        return training(model, lambda: model(torch.randn(8, 64)).sum())

    prediction = memtriage.predict(build)
    assert prediction.by_owner["parameter"] == (64 * 64 + 64) * 4


def test_storages_of_the_device_are_resized_and_moved():
    def run(device):
        made = torch.empty(64, device=device)
        storage = made.untyped_storage()
        address = storage.data_ptr()
        storage.resize_(0)
        empty = storage.data_ptr()
        storage.resize_(1024)
        real = torch.arange(4)
        there = real.untyped_storage().to(device="cuda")
        same = real.untyped_storage().to(device="cpu")
        return (
            address == storage.data_ptr() != 0, empty, real.untyped_storage().data_ptr() == real.data_ptr(),
            there.nbytes(), same.data_ptr() == real.data_ptr(),
        )  # fmt: skip

    run = traced(run)
    assert (run.answer, run.made) == ((True, 0, True, 32, True), "empty 256, resize_ 1024, _to_copy 32")


def test_tensors_of_the_device_are_saved_and_loaded_as_parts_of_their_storage():
    def run(device):
        table = torch.empty(8, 4, device=device)
        buffer = io.BytesIO()
        torch.save({"row": table[2], "column": table[:, 1], "host": torch.arange(3)}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer)
        return {
            name: (str(each.device), tuple(each.shape), each.stride(), each.storage_offset())
            for name, each in loaded.items()
        }

    run = traced(run, world_size=2, rank=1)
    assert (run.answer, run.made) == (
        {
            "row": ("cuda:1", (4,), (1,), 8),
            "column": ("cuda:1", (8,), (4,), 1),
            "host": ("cpu", (3,), (1,), 0),
        },
        "empty 128, _to_copy 128",
    )


@pytest.mark.parametrize("streams", [None, [None], "one"])
def test_a_batch_is_scattered_to_the_one_device(streams):
    def run(device):
        given = [torch.cuda.Stream()] if streams == "one" else streams
        (part,) = comm.scatter(torch.ones(1 << 8), [0], streams=given)
        return str(part.device), torch.cuda.current_stream().stream_id

    run = traced(run)
    blocks = [block for block in run.trace.recording.blocks if block.size == 1 << 10]
    assert run.answer == ("cuda:0", 0)
    assert [block.stream for block in blocks] == [1 if streams == "one" else 0]


def test_data_parallel_over_many_devices_is_refused():
    with pytest.raises(ValueError, match=r"nn.DataParallel over 2 GPUs cannot be traced.*device_ids=\[0\]"):
        traced(lambda device: comm.scatter(torch.ones(8), [0, 1]))
