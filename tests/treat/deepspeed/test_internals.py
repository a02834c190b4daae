"""Whether DeepSpeed is what the remedy knows, on modules that look like DeepSpeed's."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest

import memtriage
from memtriage.treat.deepspeed.internals import ACCUMULATE, FINISH, UnknownDeepSpeed, find_internals
from support.deepspeed_standins import Install, make_accelerator, make_optimizer


def lacking(name: str) -> Any:
    accelerator = make_accelerator()
    delattr(type(accelerator), name)
    return accelerator


def changed_optimizer(**attributes: Any) -> Any:
    return type("DeepSpeedZeroOptimizer", (), dict(vars(make_optimizer(make_accelerator()))) | attributes)


def one_more_reader(self: Any) -> Any:
    return self.param_buffer_of_bit16_for_cpu_offload_groups[0].float()


STAGING = "param_buffer_of_bit16_for_cpu_offload_groups"
NO_METHOD = "Accelerator has no method {}, through which memory would be pinned"
NO_CLASS = "runtime.zero.stage_1_and_2 has no class DeepSpeedZeroOptimizer"
MAY = "expected __init__, _unpin_offload_buffers, step"


def pin(self: Any, tensor: Any, more: Any) -> Any:
    return tensor


def pin_empty(self: Any, tensor: Any) -> Any:
    return tensor


def with_method(name: str, method: Any) -> Any:
    accelerator = make_accelerator()
    setattr(type(accelerator), name, method)
    return accelerator


@pytest.mark.parametrize(
    ("accelerator", "optimizer", "said"),
    [
        (lacking("_torch_pin_memory"), None, NO_METHOD.format("_torch_pin_memory")),
        (lacking("_torch_empty_pinned"), None, NO_METHOD.format("_torch_empty_pinned")),
        (
            with_method("_torch_pin_memory", pin), None,
            "_torch_pin_memory(tensor: 'Any', more: 'Any') -> 'Any' was found, expected "
            "_torch_pin_memory(tensor)",
        ),
        (
            with_method("_torch_empty_pinned", pin_empty), None,
            "_torch_empty_pinned(tensor: 'Any') -> 'Any' was found, expected "
            "_torch_empty_pinned(tensor, shape)",
        ),
        (None, "no class", NO_CLASS),
        (
            None, changed_optimizer(step=lambda self: None),
            f"__init__, _unpin_offload_buffers of DeepSpeedZeroOptimizer uses {STAGING}, {MAY}",
        ),
        (
            None, changed_optimizer(gather=one_more_reader),
            f"__init__, _unpin_offload_buffers, gather, step of DeepSpeedZeroOptimizer uses {STAGING}, {MAY}",
        ),
        (
            None, changed_optimizer(initialize_optimizer_states=None),
            "DeepSpeedZeroOptimizer has no method initialize_optimizer_states",
        ),
        (
            None, changed_optimizer(__init__=one_more_reader),
            "DeepSpeedZeroOptimizer.__init__ does not call initialize_optimizer_states",
        ),
        (
            lacking("_torch_pin_memory"), "no class",
            f"{NO_METHOD.format('_torch_pin_memory')}; {NO_CLASS}",
        ),
    ],
)  # fmt: skip
def test_other_internals_are_refused_with_what_was_found(
    install: Install, accelerator: Any, optimizer: Any, said: str
) -> None:
    install(accelerator, optimizer)
    with pytest.raises(UnknownDeepSpeed) as caught:
        find_internals()
    assert str(caught.value) == (
        f"deepspeed 9.9 is not built as expected (known: 0.19.8), so nothing was changed: {said}"
    )


def test_what_is_refused_is_left_as_it_was(install: Install) -> None:
    accelerator, _ = install(lacking("_torch_pin_memory"))
    before = dict(vars(accelerator))
    with pytest.raises(UnknownDeepSpeed):
        memtriage.deepspeed_exact_host_memory()
    assert dict(vars(accelerator)) == before


def test_what_is_known_is_told(install: Install) -> None:
    accelerator, optimizer = install()
    found = find_internals()
    assert (found.accelerator, found.optimizer, found.drops_gradient_buffer) == (accelerator, optimizer, True)
    assert found.on_cuda
    install(make_accelerator("xpu"))
    assert not find_internals().on_cuda


def test_a_method_that_is_wrapped_or_has_functions_inside_counts_as_a_reader(install: Install) -> None:
    def reading(self: Any) -> Any:
        return [getattr(each, "temp_grad_buffer_for_cpu_offload") for each in [self]]  # noqa: B009

    @functools.wraps(reading)
    def wrapped(self: Any) -> Any:
        return reading(self)

    install(None, changed_optimizer(reduce=wrapped))
    assert not find_internals().drops_gradient_buffer


def accumulate(self: Any) -> Any:
    return self.accumulated_grads_in_cpu


def nothing(self: Any) -> None:
    pass


def with_sums(**attributes: Any) -> Any:
    kind = make_optimizer(make_accelerator())

    def made(self: Any) -> None:
        self.param_buffer_of_bit16_for_cpu_offload_groups = []
        self.accumulated_grads_in_cpu = {}
        self.initialize_optimizer_states()

    changed = {"__init__": made, ACCUMULATE: accumulate, FINISH: nothing} | attributes
    return type("DeepSpeedZeroOptimizer", (), dict(vars(kind)) | changed)


SUMS = "of DeepSpeedZeroOptimizer uses accumulated_grads_in_cpu, expected"
SUMS_READERS = f"__init__, _restore_cpu_offload_grad_to_gpu, {ACCUMULATE}, set_norm_for_param_grad"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"set_norm_for_param_grad": accumulate}, None),
        ({FINISH: None}, f"DeepSpeedZeroOptimizer has no method {FINISH}"),
        ({ACCUMULATE: nothing}, f"__init__ {SUMS} {SUMS_READERS}"),
        ({"other": accumulate}, f"__init__, {ACCUMULATE}, other {SUMS} {SUMS_READERS}"),
    ],
)
def test_what_shares_the_sums_of_micro_batches_is_looked_at_when_asked(
    install: Install, changed: dict[str, Any], said: str | None
) -> None:
    install(None, with_sums(**changed))
    assert find_internals().drops_gradient_buffer
    if said is None:
        assert find_internals(sums=True).optimizer is not None
    else:
        with pytest.raises(UnknownDeepSpeed) as caught:
            find_internals(sums=True)
        assert str(caught.value).endswith(f"so nothing was changed: {said}")


def test_without_deepspeed_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError):
        memtriage.deepspeed_exact_host_memory()
