"""Storages are found for blocks, whoever holds them; CPU memory replaces the device's."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memtriage.allocator.settings import AllocatorSettings
from memtriage.treat.compaction.plan import Movable
from memtriage.treat.compaction.storages import CPP_ONLY, FIXED, KEPT, NOT_OURS, SEVERAL, StorageFinder
from memtriage.treat.device.protocol import ACTIVE, DeviceLayout

SIZE = 4096


@pytest.fixture(autouse=True)
def memory_of_the_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build of torch can tell that no storage here is of its CUDA allocator."""
    monkeypatch.delattr(torch._C, "_has_Standard_Deleter", raising=False)


def layout_of(*addresses: int) -> DeviceLayout:
    """Blocks of `SIZE` bytes."""
    column = np.array(sorted(addresses), np.int64)
    sizes = np.full(len(column), SIZE)
    return DeviceLayout(
        (),
        np.array([0, len(column)]),
        column,
        sizes,
        sizes,
        np.full(len(column), ACTIVE),
        AllocatorSettings(),
    )


def find(*addresses: int, keep: tuple[Any, ...] = ()) -> Movable:
    with StorageFinder(keep) as find:
        return find(layout_of(*addresses), list(range(len(addresses))))


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def bytes_of(size: int = SIZE) -> Tensor:
    return torch.ones(size, dtype=torch.uint8)


def assert_found(address: int) -> None:
    messages = find(address)
    assert messages.reasons == {}
    (storage,) = messages.storages.values()
    assert storage.data_ptr() == address


def future_of(tensor: Tensor) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(tensor)
    return future


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: tensor,
        future_of,
        lambda tensor: tensor[100:200:3],
        lambda tensor: tensor[:0],
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: torch.nn.Parameter(tensor.view(torch.float32)),
        lambda tensor: [{"deep": (tensor,)}],
        lambda tensor: torch.sparse_coo_tensor(
            torch.zeros(1, 1, dtype=torch.long), tensor[:1], (3,), check_invariants=False
        ),
    ],
    ids=[
        "tensor",
        "future",
        "view",
        "empty view",
        "storage",
        "parameter",
        "container",
        "part of a sparse tensor",
    ],
)
def test_a_storage_is_found_by_what_holds_it(hold: Any) -> None:
    tensor = bytes_of()
    address = address_of(tensor)
    held = hold(tensor)
    del tensor
    assert held is not None
    assert_found(address)


def test_what_only_the_autograd_graph_saved_is_found() -> None:
    logits = torch.ones(1, SIZE // 4, requires_grad=True)
    loss: Any = torch.nn.functional.cross_entropy(logits, torch.tensor([0]))
    with StorageFinder() as find:  # reading the address makes an object of Python's
        address = address_of(loss.grad_fn._raw_saved_self.data)
        (storage,) = find(layout_of(address), [0]).storages.values()
    assert storage.data_ptr() == address
    loss.backward()


def test_what_only_a_context_holds_is_found() -> None:
    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.kept = x.detach() + 1
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * ctx.kept

    y = Keeping.apply(torch.ones(SIZE // 4, requires_grad=True))
    assert_found(address_of(y.grad_fn.kept))


class Pair(Tensor):
    """A wrapper whose code must not run, but for telling its parts."""

    first: Tensor
    second: Tensor

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor) -> Pair:
        made: Pair = Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)
        made.first, made.second = first, second
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("subclass code ran")

    @classmethod
    def __torch_function__(cls, *arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("subclass code ran")


def test_a_block_without_a_storage_is_cpp_only() -> None:
    messages = find(512)
    assert messages.reasons == {0: CPP_ONLY}
    assert not messages.storages


@pytest.mark.parametrize(
    ("make", "shift", "reason"),
    [
        (bytes_of, -512, NOT_OURS),  # it begins elsewhere
        (lambda: bytes_of(SIZE + 1), 0, NOT_OURS),  # it is larger than its block
        (lambda: torch.from_numpy(np.ones(SIZE, np.uint8)), 0, FIXED),
        (lambda: [tensor := bytes_of(), torch.from_dlpack(tensor)], 0, SEVERAL),
    ],
)
def test_what_is_not_the_only_storage_of_its_block_does_not_move(make: Any, shift: int, reason: str) -> None:
    made = make()
    address = address_of(made[-1] if isinstance(made, list) else made)
    assert find(address + shift).reasons == {0: reason}


def test_a_storage_smaller_than_its_block_moves() -> None:
    tensor = bytes_of(SIZE - 500)
    assert_found(address_of(tensor))
    del tensor


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(
    "hold",
    [lambda tensor: tensor, lambda tensor: tensor[700:], lambda tensor: (tensor[700:], tensor, tensor[9:])],
    ids=["whole", "a part", "parts and the whole"],
)
def test_only_the_allocators_own_memory_moves(hold: Any, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds with CUDA tell whether the memory is the allocator's own."""
    monkeypatch.setattr(torch._C, "_has_Standard_Deleter", lambda handle: told, raising=False)
    tensor = bytes_of()
    address = address_of(tensor)
    held = hold(tensor)
    del tensor
    assert held is not None
    if told:
        assert_found(address)
        assert find(address - 512).reasons == {0: NOT_OURS}
    else:
        assert find(address).reasons == {0: NOT_OURS}


def test_what_is_kept_does_not_move() -> None:
    tensor = bytes_of()
    address = address_of(tensor)
    assert find(address, keep=(tensor[7:],)).reasons == {0: KEPT}
    assert find(address, keep=(tensor.untyped_storage(),)).reasons == {0: KEPT}


def test_parts_of_a_wrapper_are_found_and_kept_without_running_its_code() -> None:
    pair = Pair(bytes_of(), bytes_of())
    addresses = [address_of(part) for part in (pair.first, pair.second)]
    for address in addresses:
        assert_found(address)
    assert find(*addresses, keep=(pair,)).reasons == {0: KEPT, 1: KEPT}


def test_many_at_once_each_to_its_block() -> None:
    tensors = [bytes_of() for _ in range(500)]
    addresses = sorted(map(address_of, tensors))
    messages = find(*addresses)
    assert [messages.storages[index].data_ptr() for index in range(len(addresses))] == addresses


def test_it_may_be_asked_again_for_other_blocks() -> None:
    weight = torch.ones(SIZE // 4, requires_grad=True)
    (weight * 3).sum().backward()
    gradient = weight.grad.untyped_storage().data_ptr()
    tensors = [bytes_of() for _ in range(6)]
    alias = torch.from_dlpack(tensors[0])
    addresses = sorted([*map(address_of, tensors), gradient])
    layout = layout_of(*addresses)
    at = {address: index for index, address in enumerate(addresses)}
    blocks = list(range(len(addresses)))
    with StorageFinder() as find:
        together = find(layout, blocks)
    assert together.reasons == {at[address_of(alias)]: SEVERAL}
    for first in (blocks[:3], [at[gradient]], blocks[3:]):
        with StorageFinder() as find:
            one, other = find(layout, first), find(layout, [block for block in blocks if block not in first])
        assert one.reasons | other.reasons == together.reasons
        found = one.storages | other.storages
        assert {block: storage.data_ptr() for block, storage in found.items()} == {
            block: storage.data_ptr() for block, storage in together.storages.items()
        }
        assert set(one.storages) | set(one.reasons) == set(first)


def test_nothing_is_kept_alive() -> None:
    tensor = bytes_of()
    uses = sys.getrefcount(tensor)
    storage_uses = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    find(address_of(tensor))
    assert sys.getrefcount(tensor) == uses
    assert torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == storage_uses


def test_nor_by_a_search_that_is_never_asked() -> None:
    tensor = bytes_of()
    alive = weakref.ref(tensor)
    gc.disable()
    try:
        with StorageFinder():
            del tensor
            assert alive() is not None
        assert alive() is None
    finally:
        gc.enable()


FROZEN = """
    import gc, sys, torch
    sys.path.insert(0, {tests!r})
    from memtriage.treat.compaction import storages
    from treat_storages import address_of, bytes_of, find

    vars(torch._C).pop("_has_Standard_Deleter", None)
    before = bytes_of()
    gc.freeze()
    assert not find(address_of(before)).reasons, "frozen before the first call"
    between = bytes_of()
    gc.freeze()
    after = bytes_of()
    for tensor in (before, between, after):
        assert not find(address_of(tensor)).reasons
    assert any(reference() is between for reference in storages._frozen._known)
    assert not any(reference() is after for reference in storages._frozen._known), "it is listed, too"
    address = address_of(before)
    del before, tensor
    assert find(address).reasons
    gc.unfreeze()
    assert not find(address_of(between)).reasons
"""


def test_frozen_objects_are_found(tmp_path: Path) -> None:
    (tmp_path / "treat_storages.py").write_bytes(Path(__file__).read_bytes())
    script = textwrap.dedent(FROZEN).format(tests=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert gc.isenabled()
