"""Where torch's C++ objects have their fields, measured on objects of this process."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memtriage.outside import torch_layout
from memtriage.outside.own_memory import own_bytes, own_words
from memtriage.outside.torch_layout import TorchLayout, calibrate, class_name, libraries, type_name_of


@pytest.fixture(scope="module")
def layout() -> TorchLayout:
    return calibrate()


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        (b"N5torch8autograd14AccumulateGradE", "AccumulateGrad"),
        (b"N3c1010TensorImplE", "TensorImpl"),
        (b"N5torch8autograd9generated12MulBackward0E", "MulBackward0"),
        (b"N5torch8autograd", "autograd"),
        (b"6MyNode", "MyNode"),
        (b"St9exception", ""),
        (b"", ""),
        (b"N", ""),
        (b"N5tor", "tor"),
    ],
)
def test_the_last_name_of_a_mangled_one(mangled: bytes, name: str) -> None:
    assert class_name(mangled) == name


def test_the_class_of_an_object_is_found_by_its_table() -> None:
    tensor = torch.ones(3)
    table = own_words(tensor._cdata, 1)[0]
    assert class_name(type_name_of(own_words, own_bytes, table)) == "TensorImpl"
    zeros = (ctypes.c_int64 * 4)()
    assert type_name_of(own_words, own_bytes, ctypes.addressof(zeros) + 8) == b""
    assert type_name_of(own_words, own_bytes, 8) == b"" == type_name_of(own_words, own_bytes, 0)


def test_measuring_again_gives_the_same_and_leaves_no_trace(layout: TorchLayout) -> None:
    was_enabled = torch.is_grad_enabled()
    with torch.no_grad():
        assert calibrate() == layout
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled() == was_enabled


def test_fields_of_a_tensor_and_of_its_storage(layout: TorchLayout) -> None:
    tensor = torch.ones(7, 3, requires_grad=True)
    storage = tensor.untyped_storage()
    assert own_words(id(tensor) + layout.wrapper_tensor, 1)[0] == tensor._cdata
    assert own_words(tensor._cdata + layout.tensor_storage, 1)[0] == storage._cdata
    assert own_words(tensor._cdata + layout.tensor_wrapper, 1)[0] & ~1 == id(tensor)
    assert own_words(storage._cdata + layout.storage_data, 1)[0] == storage.data_ptr()
    assert own_words(storage._cdata + layout.storage_size, 1)[0] == 84
    devices = [own_bytes(one.untyped_storage()._cdata + layout.storage_device, 1)[0] for one in
               (tensor, torch.ones(2, device="meta"))]  # fmt: skip
    assert [layout.devices[number] for number in devices] == ["cpu", "meta"]
    assert layout.devices[1] == "cuda"


def test_fields_of_autograds_part_of_a_tensor(layout: TorchLayout) -> None:
    leaf = torch.ones(3, requires_grad=True)
    leaf.grad = torch.ones(3)
    product = leaf * 2
    view = product[1:]
    meta = {name: own_words(one._cdata + layout.tensor_meta, 1)[0] for name, one in
            (("leaf", leaf), ("product", product), ("view", view))}  # fmt: skip
    assert own_words(meta["leaf"] + layout.meta_gradient, 1)[0] == leaf.grad._cdata
    assert own_words(meta["leaf"] + layout.meta_node, 1)[0] == 0
    assert own_words(meta["view"] + layout.meta_base, 1)[0] == product._cdata
    assert own_bytes(meta["product"] + layout.meta_retains, 1)[0] == 0
    product.retain_grad()
    assert own_bytes(meta["product"] + layout.meta_retains, 1)[0] == 1
    node = own_words(meta["product"] + layout.meta_node, 1)[0]
    made_by = product.grad_fn
    assert own_words(node + layout.node_wrapper, 1)[0] & ~1 == id(made_by)
    begin, end = own_words(node + layout.node_edges, 2)
    assert (end - begin) == 2 * layout.edge_size
    assert own_words(own_words(begin, 1)[0] + layout.leaf, 1)[0] == leaf._cdata


def test_names_of_what_nodes_save_are_in_the_order_of_c(layout: TorchLayout) -> None:
    assert layout.node_names["MulBackward0"] == ("other", "self")
    assert layout.node_names["ExpBackward0"] == ("result",)
    assert layout.node_names["SumBackward0"] == ()


def test_the_files_that_must_be_the_same() -> None:
    loaded = Path("/proc/self/maps").read_text()
    assert all(part in loaded for part in libraries())


def test_old_pointers_in_bytes_that_no_field_fills_are_not_taken_for_one(
    layout: TorchLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every word of autograd's part before the gradient's looks like it, as old bytes of a string may."""

    class Stale(torch_layout._Specimen):
        def __init__(self, torch: Any, size: int) -> None:
            super().__init__(torch, size)
            self.before: list[int] = []

        def meta(self, tensor: Any, meta_at: int) -> list[int]:
            words = super().meta(tensor, meta_at)
            if tensor is not self.leaf:
                return words
            gradient, stale = layout.meta_gradient >> 3, self.before or words
            self.before = words
            return [stale[gradient]] * gradient + words[gradient:]

    monkeypatch.setattr(torch_layout, "_Specimen", Stale)
    assert calibrate() == layout


def test_the_number_of_a_device_is_read_while_the_device_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, kind: str) -> None:
            self.kind = kind

        def __del__(self) -> None:
            freed.append(self.kind)

    def read(address: int, count: int) -> bytes:
        assert not freed
        return b"5"

    freed: list[str] = []
    monkeypatch.setattr(torch_layout, "own_bytes", read)
    assert torch_layout._device_number(SimpleNamespace(device=Device), "cpu") == ord("5")
    assert freed == ["cpu"]
