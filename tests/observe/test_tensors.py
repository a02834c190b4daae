"""Identity of storages, and what has none."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from memtriage.observe.tensors import (
    StorageFacts,
    end_bytes,
    is_pinned,
    is_shared,
    plain,
    storage_facts,
    undisturbed,
)
from support.certain import certain


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


def facts(tensor: Any) -> StorageFacts | None:
    with torch._C.DisableTorchFunction(), warnings.catch_warnings():
        warnings.simplefilter("error")
        return storage_facts(tensor)


def test_views_share_their_base() -> None:
    base = torch.ones(100, dtype=torch.float64)
    expected = StorageFacts("cpu", base.untyped_storage().data_ptr(), 800)
    assert expected.address == base.data_ptr()
    for tensor in (base, base[50:], base.view(10, 10).t(), base.detach(), torch.nn.Parameter(base)):
        assert facts(tensor) == expected
    assert facts(base.clone()) != expected


def test_what_has_no_storage() -> None:
    resized = torch.ones(9)
    resized.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.ones(9)
    for tensor in (
        torch.empty(0),
        torch.empty(9, device="meta"),
        fake,
        resized,
        torch.eye(3).to_sparse(),
        Wrapper(torch.ones(9)),
        torch.nn.parameter.UninitializedParameter(),
    ):
        assert facts(tensor) is None


def test_wrappers_of_function_transforms_have_none() -> None:
    seen: list[StorageFacts | None] = []
    torch.vmap(lambda x: (seen.append(facts(x)), x * 2)[1])(torch.ones(3, 4))
    assert seen == [None]


def test_quantized_tensors_have_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_tensor(torch.ones(64), 0.1, 0, torch.quint8)
    known = certain(facts(tensor))
    assert known.nbytes == 64


@pytest.mark.parametrize(
    ("count", "last", "expected"), [(4, False, b"\1\2\3\4"), (64, False, b"\1\2\3\4\5"), (2, True, b"\4\5")]
)
def test_end_bytes(count: int, last: bool, expected: bytes) -> None:
    tensor = torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)
    assert end_bytes(tensor[2:4], certain(facts(tensor)), count, last=last) == expected


def test_ends_of_device_memory_are_read_through_a_copy() -> None:
    tensor = torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)
    of_device = StorageFacts("cuda:0", 0, 5)  # its address is not one of the host
    assert end_bytes(tensor[2:], of_device, 2) == b"\1\2"
    assert end_bytes(tensor[2:], of_device, 2, last=True) == b"\4\5"
    assert end_bytes(torch.eye(3).to_sparse(), of_device, 2) is None


def test_the_programs_functions_do_not_run_while_undisturbed() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} was called")

    class LoudMode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} was called")

    loud = torch.ones(2).as_subclass(Loud)
    with LoudMode(), undisturbed():
        assert loud.detach().numel() == 2
    with pytest.raises(AssertionError, match="was called"):
        loud.detach()


def test_before_torch_is_imported_nothing_is_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (None, SimpleNamespace()):
        monkeypatch.setitem(sys.modules, "torch", module)
        with undisturbed():
            pass


def test_shared_and_pinned() -> None:
    plain, shared = torch.ones(9), torch.ones(9).share_memory_()
    assert [is_shared(plain), is_shared(shared)] == [False, True]
    assert not is_shared(torch.eye(3).to_sparse())
    if not torch.cuda.is_initialized():
        assert not is_pinned(plain)
        assert not torch.cuda.is_initialized()


def test_only_torchs_own_tensors_are_read_as_they_are() -> None:
    class Sub(torch.Tensor):
        @property
        def shape(self) -> Any:
            raise AssertionError("the subclass was asked")

    tensor, weight, sub = torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Sub)
    assert plain(tensor) is tensor and plain(weight) is weight
    with undisturbed():
        shown = plain(sub)
        assert shown is not sub and shown.shape == (2,)
        assert plain(shown) is shown
