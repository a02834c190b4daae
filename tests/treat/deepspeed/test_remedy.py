"""Patches on and off, and what is refused, on modules that look like DeepSpeed's."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import memtriage
from memtriage.treat.deepspeed import remedy
from memtriage.treat.deepspeed.internals import UnknownDeepSpeed
from memtriage.treat.deepspeed.staging import Streamed
from memtriage.treat.offload.pinned import host_memory

LARGE = remedy.EXACT_FROM


def make_accelerator(name: str = "cuda") -> Any:
    class Accelerator:
        def device_name(self) -> str:
            return name

        def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
            return tensor.new_empty(shape)

        def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
            return self._torch_pin_memory(tensor)

    return Accelerator()


def make_optimizer(accelerator: Any) -> Any:
    class DeepSpeedZeroOptimizer:
        cpu_offload_pin_memory = True

        def __init__(self, count: int, *, cpu_offload: bool = True) -> None:
            self.cpu_offload = cpu_offload
            self.masters = accelerator.pin_memory(torch.ones(count))
            self.on_device = torch.zeros(count, dtype=torch.bfloat16)
            self.param_buffer_of_bit16_for_cpu_offload_groups = [torch.zeros(count, dtype=torch.bfloat16)]
            self.temp_grad_buffer_for_cpu_offload = torch.zeros(count, dtype=torch.bfloat16)
            self.initialize_optimizer_states()

        def initialize_optimizer_states(self) -> None:
            self.gradients = accelerator.pin_memory(torch.zeros_like(self.masters))

        def step(self, closure: Any = None) -> None:
            self.masters.mul_(1.25)
            buffer = self.param_buffer_of_bit16_for_cpu_offload_groups[0]
            buffer.data.copy_(self.masters.data)
            self.on_device.data.copy_(buffer.data, non_blocking=True)

        def _unpin_offload_buffers(self) -> None:
            self.temp_grad_buffer_for_cpu_offload, self.param_buffer_of_bit16_for_cpu_offload_groups = (
                None,
                [],
            )

    return DeepSpeedZeroOptimizer


Install = Callable[..., tuple[Any, Any]]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put modules instead of DeepSpeed's; returns accelerator and optimizer class."""

    def put(accelerator: Any = None, optimizer: Any = None) -> tuple[Any, Any]:
        accelerator = accelerator or make_accelerator()
        optimizer = optimizer or make_optimizer(accelerator)
        contents: dict[str, dict[str, Any]] = {
            "deepspeed": {"__version__": "9.9"},
            "deepspeed.accelerator": {"get_accelerator": lambda: accelerator},
            "deepspeed.runtime": {},
            "deepspeed.runtime.zero": {},
            "deepspeed.runtime.zero.stage_1_and_2": {"DeepSpeedZeroOptimizer": optimizer},
        }
        for name, attributes in contents.items():
            module = ModuleType(name)
            vars(module).update(attributes)
            monkeypatch.setitem(sys.modules, name, module)
        return accelerator, optimizer

    return put


@pytest.fixture(autouse=True)
def without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedy, "locked_memory", host_memory)


def test_only_large_buffers_are_pinned_exactly(install: Install) -> None:
    accelerator, _ = install()
    template = torch.zeros(0, dtype=torch.float32)
    with memtriage.deepspeed_exact_host_memory() as handle:
        exact = accelerator.pin_memory(torch.arange(LARGE // 4 + 1, dtype=torch.float32).view(1, -1))
        assert torch.equal(exact.flatten(), torch.arange(LARGE // 4 + 1, dtype=torch.float32))
        assert exact.shape == (1, LARGE // 4 + 1)
        assert exact.data_ptr() % 4096 == 0
        assert handle.rounding == 2 * LARGE - (LARGE + 4)
        empty = accelerator._torch_empty_pinned(template, (3, LARGE))
        assert empty.shape == (3, LARGE) and empty.dtype == torch.float32
        before = handle.rounding
        assert accelerator.pin_memory(torch.ones(5)).sum() == 5
        assert accelerator._torch_empty_pinned(template, (2, 3)).shape == (2, 3)
        assert handle.rounding == before


def test_what_is_not_contiguous_is_pinned_as_before(install: Install) -> None:
    accelerator, _ = install()
    across = torch.rand(1024, 512).t()
    with memtriage.deepspeed_exact_host_memory() as handle:
        assert torch.equal(accelerator.pin_memory(across), across)
        assert handle.rounding == 0


def test_a_refused_registration_leaves_it_to_torch(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedy, "locked_memory", lambda nbytes: None)
    accelerator, _ = install()
    with memtriage.deepspeed_exact_host_memory() as handle:
        assert accelerator.pin_memory(torch.ones(LARGE)).sum() == LARGE
        assert accelerator._torch_empty_pinned(torch.zeros(0), (LARGE,)).shape == (LARGE,)
        assert handle.rounding == 0


def test_other_devices_than_cuda_pin_as_before(install: Install) -> None:
    accelerator, _ = install(make_accelerator("xpu"))
    with memtriage.deepspeed_exact_host_memory():
        assert not vars(accelerator)


def test_the_staging_copy_goes_and_the_weights_are_the_same(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[None] = []
    monkeypatch.setattr(remedy, "trim", lambda: trims.append(None))
    _, kind = install()
    with memtriage.deepspeed_exact_host_memory() as handle:
        optimizer = kind(1000)
        assert len(trims) == 1
        assert isinstance(optimizer.param_buffer_of_bit16_for_cpu_offload_groups[0], Streamed)
        assert optimizer.temp_grad_buffer_for_cpu_offload.numel() == 0
        assert handle.staging == 2000
        for _ in range(3):
            optimizer.step()
        assert len(trims) == 2  # the first step is what trims
        assert torch.equal(optimizer.on_device, torch.full((1000,), 1.25**3).bfloat16())
    assert optimizer.param_buffer_of_bit16_for_cpu_offload_groups[0].shape == (1000,)
    assert optimizer.temp_grad_buffer_for_cpu_offload.shape == (1000,)
    optimizer.step()
    assert torch.equal(optimizer.on_device, torch.full((1000,), 1.25**4).bfloat16())


def test_optimizers_without_offload_are_left_alone(install: Install) -> None:
    _, kind = install()

    class Other(kind):
        def step(self, closure: Any = None) -> None:
            pass

    with memtriage.deepspeed_exact_host_memory() as handle:
        Other(10), kind(10, cpu_offload=False)
        assert handle.staging == 0


def test_undone_everything_is_what_it_was(install: Install) -> None:
    accelerator, kind = install()
    before = dict(vars(kind)), dict(vars(accelerator))
    handle = memtriage.deepspeed_exact_host_memory()
    assert handle.active
    assert dict(vars(kind)) != before[0]
    gone = kind(10)
    del gone
    gc.collect()
    handle.undo()
    handle.undo()
    assert not handle.active
    assert (dict(vars(kind)), dict(vars(accelerator))) == before
    memtriage.deepspeed_exact_host_memory().undo()


def test_it_is_on_once(install: Install) -> None:
    install()
    with memtriage.deepspeed_exact_host_memory(), pytest.raises(RuntimeError, match="on already"):
        memtriage.deepspeed_exact_host_memory()
    memtriage.deepspeed_exact_host_memory().undo()


def lacking(name: str) -> Any:
    accelerator = make_accelerator()
    delattr(type(accelerator), name)
    return accelerator


def changed_optimizer(**attributes: Any) -> Any:
    return type("DeepSpeedZeroOptimizer", (), dict(vars(make_optimizer(make_accelerator()))) | attributes)


def one_more_reader(self: Any) -> Any:
    return self.param_buffer_of_bit16_for_cpu_offload_groups[0].float()


@pytest.mark.parametrize(
    ("accelerator", "optimizer", "said"),
    [
        (lacking("_torch_pin_memory"), None, "Accelerator has no method _torch_pin_memory"),
        (lacking("_torch_empty_pinned"), None, "Accelerator has no method _torch_empty_pinned"),
        (None, "no class", "has no class DeepSpeedZeroOptimizer"),
        (None, changed_optimizer(step=lambda self: None), "expected .*step"),
        (None, changed_optimizer(gather=one_more_reader), "gather, step"),
        (None, changed_optimizer(initialize_optimizer_states=None), "no method initialize_optimizer_states"),
        (None, changed_optimizer(__init__=one_more_reader), "does not call initialize_optimizer_states"),
    ],
)
def test_other_internals_are_refused_and_nothing_changes(
    install: Install, accelerator: Any, optimizer: Any, said: str
) -> None:
    accelerator, optimizer = install(accelerator, optimizer)
    before = dict(vars(accelerator))
    with pytest.raises(UnknownDeepSpeed, match=rf"deepspeed 9\.9 .*nothing was changed.*{said}"):
        memtriage.deepspeed_exact_host_memory()
    assert dict(vars(accelerator)) == before


def test_a_buffer_that_a_version_uses_is_kept(install: Install) -> None:
    accelerator = make_accelerator()

    def reduce(self: Any) -> Any:
        return self.temp_grad_buffer_for_cpu_offload

    kind = type("DeepSpeedZeroOptimizer", (), dict(vars(make_optimizer(accelerator))) | {"reduce": reduce})
    install(accelerator, kind)
    with memtriage.deepspeed_exact_host_memory():
        assert kind(10).temp_grad_buffer_for_cpu_offload.numel() == 10


def test_without_deepspeed_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError):
        memtriage.deepspeed_exact_host_memory()
