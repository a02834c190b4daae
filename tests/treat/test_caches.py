"""`clear_caches`: each entry on its own, what really went, and a report that hides nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
import pytest
import torch

import memtriage
from memtriage.catalogue import contents
from memtriage.catalogue.catalogue import GENERIC, holders
from memtriage.model.blocks import Block, DeviceCounters, Segment
from memtriage.model.holders import Cleared, HolderOutcome, SegmentPinning
from memtriage.observe import cuda
from memtriage.observe.tensors import StorageFacts
from support.holder_standins import NBYTES, STANDINS, Stage, tensor

pytestmark = pytest.mark.usefixtures("only_new_objects")

MIB = 1 << 20


def named(outcomes: list[HolderOutcome]) -> list[str]:
    """Names but those of torch's own entries, which other tests of the process may have left something in."""
    return [outcome.name for outcome in outcomes if not outcome.name.startswith("torch.")]


def fill(stage: Stage, *names: str) -> None:
    for name in names:
        STANDINS[name][0](stage)()


def test_all_but_the_generic_detectors_are_asked_by_default(stage: Stage) -> None:
    fill(stage, "te.causal_mask", "megatron.rotary", "te.fp8_meta", "te.flex_attention")
    report = memtriage.clear_caches()
    assert [entry.name for entry in report.entries] == [holder.name for holder in holders(generic=False)]
    assert named(report.cleared) == ["te.causal_mask", "megatron.rotary"]
    assert named(report.skipped) == ["te.flex_attention", "te.fp8_meta"]
    assert report.freed == {"cpu": 2 * NBYTES}


def test_kinds_and_names_choose(stage: Stage) -> None:
    fill(stage, "te.causal_mask", "te.fp8_workspaces", "te.flex_attention")
    assert [outcome.name for outcome in memtriage.clear_caches(["weight copies"]).cleared] == [
        "te.fp8_workspaces"
    ]
    assert [outcome.name for outcome in memtriage.clear_caches("te.flex_attention").cleared] == [
        "te.flex_attention"
    ]
    assert [outcome.name for outcome in memtriage.clear_caches(iter(["lookup table"])).cleared] == [
        "te.causal_mask"
    ]
    fill(stage, "te.causal_mask")
    of_te = memtriage.clear_caches(["te"]).entries
    assert of_te and all(name.name.startswith("te.") for name in of_te)
    assert memtriage.clear_caches([]).entries == []


def test_an_unknown_kind_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'caches'.*weight copies.*te\.fp8_workspaces"):
        memtriage.clear_caches(["caches"])


def test_one_that_fails_does_not_stop_the_others(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(stage, "te.causal_mask", "torch.offload_pool")

    class Stubborn(dict[Any, Any]):
        def clear(self) -> None:
            raise OSError("not now")

    stage.module("transformer_engine.pytorch.module.base", _dummy_wgrads=Stubborn(a=tensor()))
    report = memtriage.clear_caches()
    (failed,) = report.failed
    assert failed.name == "te.dummy_wgrads" and "OSError: not now" in (failed.reason or "")
    assert (failed.before, failed.after, failed.freed) == ({"cpu": NBYTES}, {"cpu": NBYTES}, {})
    assert {"te.causal_mask", "torch.offload_pool"} <= {outcome.name for outcome in report.cleared}


def test_one_that_cannot_be_read_is_told(stage: Stage) -> None:
    class Odd(dict[Any, Any]):
        def __len__(self) -> int:
            raise LookupError("of another version")

    stage.module("transformer_engine.pytorch.softmax", _default_causal_mask=Odd())
    fill(stage, "megatron.rotary")
    report = memtriage.clear_caches()
    assert [(outcome.name, outcome.reason) for outcome in report.failed] == [
        ("te.causal_mask", "it could not be read: LookupError: of another version")
    ]
    assert named(report.cleared) == ["megatron.rotary"]


def test_only_what_nothing_else_holds_is_freed(stage: Stage) -> None:
    kept, cache = tensor(), {}
    cache.update(a=kept, b=tensor())
    stage.module("transformer_engine.pytorch.softmax", _default_causal_mask=cache)
    (outcome,) = memtriage.clear_caches(["te.causal_mask"]).entries
    assert (outcome.before, outcome.after) == ({"cpu": 2 * NBYTES}, {})
    assert outcome.freed == {"cpu": NBYTES}
    assert kept.sum() == 1000


def test_what_a_garbage_cycle_holds_goes_with_the_collection(stage: Stage) -> None:
    class Node:
        pass

    cache: dict[str, Any] = {}
    stage.module("transformer_engine.pytorch.softmax", _default_causal_mask=cache)
    node: Any = Node()
    node.itself, node.data = node, tensor()
    cache["a"] = node
    del node
    report = memtriage.clear_caches(["te.causal_mask"])
    assert report.entries[0].freed == {"cpu": NBYTES}
    assert report.collected


def test_nothing_stays_alive_through_the_report(stage: Stage) -> None:
    fill(stage, "te.fp8_meta", "te.causal_mask")
    (module,) = stage.kept
    reference = torch.multiprocessing.reductions.StorageWeakRef(
        module.fp8_meta["scaling_fwd"].amax_history.untyped_storage()
    )
    report = memtriage.clear_caches()
    module.fp8_meta.clear()
    assert reference.expired()
    assert isinstance(report, Cleared)


def test_a_generic_cache_is_cleared_only_when_asked_for(stage: Stage) -> None:
    @lru_cache
    def mask(length: int) -> torch.Tensor:
        return torch.ones(length)

    stage.keep(mask)
    mask(1000)
    assert mask.cache_info().currsize == 1
    memtriage.clear_caches()
    assert mask.cache_info().currsize == 1
    report = memtriage.clear_caches(["generic"])
    assert [entry.name for entry in report.entries] == [holder.name for holder in GENERIC]
    assert report.cleared[0].freed == {"cpu": 4000}
    assert mask.cache_info().currsize == 0


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """CUDA seems to be in use: what is called, in order."""
    calls: list[str] = []
    allocated = iter([100, 60, 40, 40, 40])
    monkeypatch.setattr(cuda, "initialized", lambda: True)
    monkeypatch.setattr(cuda, "devices", lambda: [0])
    monkeypatch.setattr(cuda, "capturing", lambda: False)
    monkeypatch.setattr(cuda, "segments", list)
    monkeypatch.setattr(
        cuda, "counters", lambda index: DeviceCounters(allocated=next(allocated), reserved=200 - len(calls))
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    return lambda: calls


def test_devices_are_synchronized_and_figures_taken_three_times(
    stage: Stage, fake_device: Callable[[], list[str]]
) -> None:
    cache: dict[str, Any] = {}
    stage.module("transformer_engine.pytorch.softmax", _default_causal_mask=cache)
    cache["a"] = tensor()
    report = memtriage.clear_caches(["te.causal_mask"])
    assert fake_device() == ["synchronize", "empty_cache"]
    assert [figures["cuda:0"].allocated for figures in (report.before, report.after_clear, report.after)] == [
        100, 60, 40,
    ]  # fmt: skip
    assert [figures["cuda:0"].reserved for figures in (report.before, report.after_clear, report.after)] == [
        200, 199, 198,
    ]  # fmt: skip
    assert report.cache == "emptied"
    assert report.lines()[-1] == ("cuda:0: allocated 100 B -> 40 B, reserved 200 B -> 198 B; cache emptied")


def test_what_an_entry_pins_is_told(
    stage: Stage, fake_device: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache: dict[str, Any] = {"a": tensor()}
    stage.module("transformer_engine.pytorch.softmax", _default_causal_mask=cache)
    address = cache["a"].data_ptr()
    blocks = (
        Block(address=address, size=MIB, requested=NBYTES, state="active"),
        Block(address=address + MIB, size=19 * MIB, requested=0, state="free"),
    )
    segment = Segment(
        device=0, address=address, size=20 * MIB, stream=0, pool=(0, 0), expandable=False, blocks=blocks
    )
    monkeypatch.setattr(cuda, "segments", lambda: [segment])
    monkeypatch.setattr(
        contents, "storage_facts", lambda tensor: StorageFacts("cuda:0", tensor.data_ptr(), tensor.nbytes)
    )
    report = memtriage.clear_caches(["te.causal_mask"])
    assert report.entries[0].pins == SegmentPinning(segments=1, nbytes=20 * MIB, releasable=20 * MIB)
    assert "in segments of 20.0 MiB (20.0 MiB releasable without it)" in report.lines()[0]


def test_what_only_cpp_held_is_told_by_the_fall_of_the_counter(
    stage: Stage, fake_device: Callable[[], list[str]]
) -> None:
    fill(stage, "torch.cublas_workspaces")
    report = memtriage.clear_caches(["torch.cublas_workspaces"])
    assert (report.entries[0].status, report.entries[0].freed) == ("cleared", {"cuda:0": 20})


def test_the_cache_may_be_left_as_it_is(fake_device: Callable[[], list[str]]) -> None:
    assert memtriage.clear_caches([], empty_cache=False).cache == "left as it was"
    assert fake_device() == ["synchronize"]


def test_an_error_of_the_driver_is_told(
    fake_device: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    assert memtriage.clear_caches([]).cache == "not emptied: an illegal memory access was encountered"


def test_the_report_can_be_written_as_json_and_read(stage: Stage) -> None:
    fill(stage, "te.causal_mask", "te.fp8_meta")
    report = memtriage.clear_caches()
    assert msgspec.json.decode(msgspec.json.encode(report), type=Cleared) == report
    lines = report.lines()
    assert lines[0] == "te.causal_mask: cleared, held 3.9 KiB on cpu, freed 3.9 KiB on cpu"
    assert lines[1] == "te.fp8_meta: skipped (it is model state), holds 3.9 KiB on cpu"
