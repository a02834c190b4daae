"""Files of safetensors in a trace: true headers, room for the data, and the memory that reading takes."""

import json
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("safetensors")

KINDS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint64, torch.uint32, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2),
]


def layers():
    """Two parameters without data: 64 and 32 bytes."""
    return {"b": nn.Parameter(torch.empty(4, 4)), "a": nn.Parameter(torch.empty(2, 4))}


def header_of(device):
    from safetensors.torch import save_file

    save_file({**layers(), "half": torch.ones(3).half()}, "net.safetensors", {"format": "pt"})
    with open("net.safetensors", "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        return length % 8, list(header.items()), len(file.read())


def every_kind(device):
    from safetensors.torch import load_file, save_file

    save_file({str(kind): torch.empty(2, dtype=kind) for kind in KINDS}, "net.safetensors")
    return all(str(tensor.dtype) == name for name, tensor in load_file("net.safetensors").items())


def opened(backend, device="cpu", look=lambda file: file.get_tensors()):
    def run(gpu):
        from safetensors import safe_open
        from safetensors.torch import save_file

        save_file(layers(), "net.safetensors")
        with safe_open("net.safetensors", "pt", device=device, backend=backend) as file:
            found = look(file)
        kept = found.values() if isinstance(found, dict) else []
        del file
        return (
            found
            if not isinstance(found, dict)
            else [
                (name, tuple(each.shape), each.device.type, each.is_contiguous())
                for name, each in zip(found, kept, strict=True)
            ]
        )

    return run


def asked(file):
    part = file.get_slice("b")
    return (
        (file.keys(), file.offset_keys(), file.metadata()),
        (part.get_shape(), part.get_dtype(), tuple(part[1:, :2].shape)),
    )


def one(file):
    return {"b": file.get_tensor("b") + 1}


def saved_from_the_gpu(device):
    from safetensors.torch import save_file

    save_file({"a": torch.empty(8, device=device), "b": torch.ones(2)}, "net.safetensors")


def never_closed(device):
    from safetensors import safe_open
    from safetensors.torch import save_file

    save_file(layers(), "net.safetensors")
    file = safe_open("net.safetensors", framework="pt")
    file.get_tensor("a") + 1
    del file


def not_one(device):
    from safetensors import safe_open

    with open("net.safetensors", "wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
    with pytest.raises(ValueError, match=r"net\.safetensors: no header of safetensors"):
        safe_open("net.safetensors", "pt")
    with pytest.raises(OSError, match="none"):
        safe_open("none", "pt")


BOTH = [("b", (4, 4), "cpu", True), ("a", (2, 4), "cpu", True)]
ON_DEVICE = [("b", (4, 4), "cuda", True), ("a", (2, 4), "cuda", True)]
HEADER = {
    "__metadata__": {"format": "pt"},
    "b": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]},
    "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [64, 96]},
    "half": {"dtype": "F16", "shape": [3], "data_offsets": [96, 102]},
}


@pytest.mark.parametrize(
    ("run", "gpu", "answer", "read"),
    [
        pytest.param(header_of, "none", (0, list(HEADER.items()), 102), [], id="header"),
        pytest.param(every_kind, "none", True, [], id="every kind"),
        pytest.param(opened("mmap"), "none", BOTH, [], id="mapped"),
        pytest.param(opened("pread"), "none", BOTH, ["64 loaded heap", "32 loaded heap"], id="read"),
        pytest.param(
            opened("mmap", look=one), "none", BOTH[:1], ["64 mapped files mapping"], id="one of a mapping"
        ),
        pytest.param(
            opened("mmap", device="cuda"), "h200", ON_DEVICE,
            ["64 mapped files mapping", "32 mapped files mapping"], id="to the device",
        ),
        pytest.param(
            opened("mmap", look=asked), "none",
            ((["a", "b"], ["b", "a"], None), ([4, 4], "F32", (3, 2))), [], id="looked at",
        ),
        pytest.param(saved_from_the_gpu, "h200", None, ["32 copies for saving heap"], id="from the device"),
        pytest.param(never_closed, "none", None, ["32 mapped files mapping"], id="never closed"),
        pytest.param(not_one, "none", None, [], id="not one"),
    ],
)  # fmt: skip
def test_files_have_a_header_and_room(host_story, run, gpu, answer, read):
    """What is read of a mapping counts while it is open, a copy of the device's while it is written."""
    found, story, _ = host_story(run, gpu=gpu)
    assert found == answer
    made = [line[1:] for line in story if line[0] == "+"]
    assert [block for block in made if "other tensors" not in block] == read
    assert sorted(block.rsplit(" ", 1)[0] for block in made) == sorted(
        line[1:] for line in story if line[0] == "-"
    )


def test_modules_have_the_functions_back(host_story):
    import safetensors
    import safetensors.torch as of_torch

    before = safetensors.safe_open, of_torch.save_file
    module = type(sys)("imports_by_name")
    module.save_file = of_torch.save_file
    sys.modules["imports_by_name"] = module

    def run(device):
        sys.modules["imports_in_the_trace"] = inside = type(sys)("imports_in_the_trace")
        inside.opens = safetensors.safe_open
        return module.save_file is not before[1], inside.opens is not before[0]

    try:
        answer, *_ = host_story(run)
        assert answer == (True, True)
        assert sys.modules["imports_in_the_trace"].opens is safetensors.safe_open is before[0]
        assert module.save_file is of_torch.save_file is before[1]
    finally:
        del sys.modules["imports_by_name"], sys.modules["imports_in_the_trace"]
