"""Known holders on a real GPU: found, measured, cleared, and never while that is forbidden."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memtriage
from memtriage.account.holder_pins import pinned_by
from memtriage.catalogue.catalogue import choose, read_holders
from memtriage.catalogue.scene import Scene
from memtriage.model.holders import Cleared, HolderOutcome, HolderReading
from memtriage.observe import cuda
from memtriage.observe.host import pinned
from memtriage.treat.te_restore import EmptyAfterRestore
from support.holder_standins import QuantizedLinear, QuantizedStorage, Stage, restore_from_saved

MIB = 1 << 20
DEVICE = "cuda:0"
Keep = Callable[[str, Any], None]


def read(*names: str) -> list[HolderReading]:
    with Scene() as scene:
        return read_holders(scene, choose(names or None))


def clear(name: str, **options: Any) -> tuple[HolderOutcome, Cleared]:
    report = memtriage.clear_caches([name], **options)
    (outcome,) = report.entries
    return outcome, report


def counted(report: Cleared) -> dict[str, int]:
    before, after = report.before[DEVICE], report.after[DEVICE]
    assert None not in (before.allocated, before.reserved, after.allocated, after.reserved)
    return {
        "allocated before": before.allocated or 0,
        "allocated after": after.allocated or 0,
        "reserved before": before.reserved or 0,
        "reserved after": after.reserved or 0,
    }


def test_cublas_workspaces_go_and_come_again(keep: Keep) -> None:
    clear("torch.cublas_workspaces")
    first = torch.cuda.memory_allocated()
    a = torch.randn(512, 512, device=DEVICE)
    product = a @ a
    with_workspace = torch.cuda.memory_allocated() - first - 2 * a.nbytes
    outcome, report = clear("torch.cublas_workspaces")
    figures = counted(report) | {"workspace": with_workspace}
    keep("holders_cublas", figures)
    assert outcome.status == "cleared"
    assert figures["allocated before"] - figures["allocated after"] == with_workspace
    assert outcome.freed == {DEVICE: with_workspace}
    assert torch.equal(a @ a, product)
    del a, product


def test_an_lru_cache_pins_a_segment_and_lets_it_go(keep: Keep) -> None:
    @functools.lru_cache(maxsize=4)
    def mask(length: int) -> torch.Tensor:
        return torch.ones(length, length, dtype=torch.bool, device=DEVICE)

    gc.collect()
    torch.cuda.empty_cache()
    held = mask(1200)  # 1.4 MiB: of the large pool, whose segments are 20 MiB
    neighbors = [torch.empty(2 * MIB, dtype=torch.uint8, device=DEVICE) for _ in range(6)]
    del held, neighbors
    (reading,) = read("generic.lru_cache")
    segments = cuda.segments(0)
    assert segments is not None
    pins = pinned_by(segments, [storage for storage in reading.storages if storage[0] == DEVICE])
    outcome, report = clear("generic.lru_cache")
    figures = counted(report)
    keep("holders_lru", figures | {"pinned": pins.nbytes, "releasable": pins.releasable})
    assert outcome.status == "cleared"
    assert outcome.freed[DEVICE] >= 1200 * 1200
    assert pins.releasable > 0 and pins.nbytes >= 20 * MIB
    assert figures["reserved before"] - figures["reserved after"] >= pins.releasable


def test_pinned_blocks_go_back_to_the_system(keep: Keep) -> None:
    block = torch.empty(24 * MIB, dtype=torch.uint8, pin_memory=True)
    del block
    gc.collect()
    torch.cuda.synchronize()
    before = pinned()
    outcome, _ = clear("torch.pinned_cache")
    after = pinned()
    assert before is not None and after is not None
    keep("holders_pinned", {"owned before": before.owned, "owned after": after.owned})
    assert outcome.status == "cleared"
    assert before.owned >= 24 * MIB and before.owned - after.owned >= 24 * MIB


def _captured() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    static = torch.ones(1024, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.mul_(2)
    return graph, static


def test_captured_graphs_forbid_until_they_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: dict[str, torch.Tensor] = {}
    Stage(monkeypatch).module("transformer_engine.pytorch.softmax", _default_causal_mask=cache)
    cache["mask"] = torch.ones(4 * MIB, dtype=torch.bool, device=DEVICE)
    graph, static = _captured()
    outcome, _ = clear("te.causal_mask")
    assert outcome.status == "skipped" and "graph" in (outcome.reason or "")
    graph.replay()
    graph.reset()
    del graph, static
    gc.collect()
    torch.cuda.empty_cache()
    outcome, _ = clear("te.causal_mask")
    assert (outcome.status, outcome.freed) == ("cleared", {DEVICE: 4 * MIB})


def test_graphs_of_torch_compile_forbid_until_they_are_reset(
    monkeypatch: pytest.MonkeyPatch, keep: Keep
) -> None:
    cache = {"mask": torch.ones(4 * MIB, dtype=torch.bool, device=DEVICE)}
    Stage(monkeypatch).module("transformer_engine.pytorch.softmax", _default_causal_mask=cache)
    layer = torch.nn.Linear(64, 64, device=DEVICE)
    compiled = torch.compile(layer, backend="cudagraphs")
    x = torch.ones(4, 64, device=DEVICE)
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(x).clone()
        expected = layer(x)
    assert torch.allclose(out, expected)
    (found,) = read("torch.cudagraph_trees")
    refused, _ = clear("te.causal_mask")
    reset, report = clear("torch.cudagraph_trees")
    allowed, _ = clear("te.causal_mask")
    keep(
        "holders_cudagraph_trees",
        {
            "entries": found.entries,
            "refused": refused.reason,
            "reset": reset.status,
            "freed": reset.freed,
            "then": (allowed.status, allowed.reason),
            **counted(report),
        },
    )
    assert refused.status == "skipped" and "graph" in (refused.reason or "")
    assert (reset.status, allowed.status) == ("cleared", "cleared")
    with torch.no_grad():
        assert torch.allclose(compiled(x), expected)
    clear("torch.dynamo")


def test_nothing_is_touched_while_a_capture_is_under_way() -> None:
    static = torch.ones(1024, device=DEVICE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.mul_(2)
        report = memtriage.clear_caches()
    assert {entry.status for entry in report.entries} == {"skipped"}
    graph.replay()
    torch.cuda.synchronize()
    assert static[0].item() == 2
    graph.reset()


def test_tensor_objects_keep_memory_after_backward_and_clearing_frees_it(
    monkeypatch: pytest.MonkeyPatch, keep: Keep
) -> None:
    Stage(monkeypatch).module("transformer_engine.pytorch")
    x = torch.randn(8 * MIB, device=DEVICE, requires_grad=True)
    out = QuantizedLinear.apply(x)
    out.sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    outcome, _ = clear("te.tensor_objects")
    freed = before - torch.cuda.memory_allocated()
    keep("holders_tensor_objects", {"freed": freed, "said": outcome.freed})
    assert outcome.status == "cleared"
    assert freed == outcome.freed[DEVICE] == 32 * MIB
    assert out.grad_fn is not None


def test_the_list_of_restored_tensors_is_empty_when_backward_is_done(
    monkeypatch: pytest.MonkeyPatch, keep: Keep
) -> None:
    name = "transformer_engine.pytorch.quantized_tensor"
    module = Stage(monkeypatch).module(name, restore_from_saved=restore_from_saved)
    monkeypatch.setattr(
        QuantizedLinear, "restore", staticmethod(lambda *given: module.__dict__["restore_from_saved"](*given))
    )

    def left_after_backward() -> tuple[int, torch.Tensor]:
        x = torch.linspace(1, 2, 4 * MIB, device=DEVICE, requires_grad=True)
        before = torch.cuda.memory_allocated()
        out = QuantizedLinear.apply(QuantizedLinear.apply(x)).sum()
        out.backward()
        assert x.grad is not None
        left = torch.cuda.memory_allocated() - before - x.grad.nbytes
        del out
        return left, x.grad

    plain, gradient = left_after_backward()
    with EmptyAfterRestore():
        remedied, same = left_after_backward()
    keep("holders_te_restore", {"left": plain, "left with the remedy": remedied})
    assert torch.equal(gradient, same)
    assert plain - remedied == 2 * 16 * MIB


def test_weight_copies_go_with_their_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    Stage(monkeypatch).module("transformer_engine.pytorch")
    layer = torch.nn.Linear(8, 8, device=DEVICE)
    data = torch.empty(32 * MIB, dtype=torch.uint8, device=DEVICE)
    layer._fp8_workspaces = {"weight": QuantizedStorage(data)}  # type: ignore[assignment]
    del data
    outcome, report = clear("te.fp8_workspaces")
    assert (outcome.status, outcome.freed) == ("cleared", {DEVICE: 32 * MIB})
    figures = counted(report)
    assert figures["reserved before"] - figures["reserved after"] >= 32 * MIB


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group(
        "nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1,
        device_id=torch.device(DEVICE),
    )  # fmt: skip
    yield
    dist.destroy_process_group()


def _train(clearing: bool) -> tuple[list[float], list[dict[str, Any]]]:
    """Two micro-batches a step: behind all but the last, FSDP2 keeps its reduce-scatter buffers."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to(DEVICE)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[float] = []
    held: list[dict[str, Any]] = []
    for _ in range(3):
        for last in (False, True):
            model.set_is_last_backward(last)
            loss = model(torch.full((16, 1024), 1.0 + last, device=DEVICE)).square().mean()
            loss.backward()
            losses.append(loss.item())
            del loss
            if clearing:
                held += [{"last": last, "held": holder.nbytes} for holder in read("fsdp2.communication")]
                outcome, _ = clear("fsdp2.communication")
                assert outcome.status in ("cleared", "absent"), outcome
                held.append({"last": last, "freed": outcome.freed, "status": outcome.status})
        optimizer.step()
        optimizer.zero_grad()
    return losses, held


def test_fsdp2_trains_on_as_if_nothing_had_been_cleared(process_group: None, keep: Keep) -> None:
    plain, _ = _train(False)
    cleared, held = _train(True)
    keep("holders_fsdp2", {"losses": cleared, "held and freed": held})
    assert cleared == plain
    assert any(holder.get("status") == "cleared" and holder["freed"] for holder in held)
    assert [holder.name for holder in read("torch.nccl")] == ["torch.nccl"]


def test_torchao_float8_training_can_be_looked_through() -> None:
    float8 = pytest.importorskip("torchao.float8")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    model = float8.convert_to_float8_training(model.to(DEVICE, torch.bfloat16))
    for _ in range(2):
        model(torch.ones(16, 256, device=DEVICE, dtype=torch.bfloat16)).float().sum().backward()
    readings = read()
    assert [reading for reading in readings if reading.failed] == []
    assert not memtriage.clear_caches().failed


def test_a_census_names_the_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: dict[str, torch.Tensor] = {"a": torch.ones(4 * MIB, dtype=torch.bool, device=DEVICE)}
    Stage(monkeypatch).module("transformer_engine.pytorch.softmax", _default_causal_mask=cache)
    address = cache["a"].data_ptr()
    (record,) = [storage for storage in memtriage.census().storages if storage.address == address]
    assert (record.known, record.owner) == ("te.causal_mask", "known cache")
    (ledger,) = memtriage.ledger(DEVICE)
    (row,) = [row for row in ledger.rows if row.owner == "known cache"]
    assert "te.causal_mask" in (row.detail or "")
    assert sum(row.bytes for row in ledger.rows) == ledger.total


def test_what_it_costs(keep: Keep) -> None:
    kept = [[number] for number in range(300_000)]
    started = time.perf_counter()
    gc.collect()
    collecting = time.perf_counter() - started
    report = memtriage.clear_caches()
    keep(
        "holders_cost",
        {"objects": len(gc.get_objects()), "clear_caches_s": report.seconds, "gc.collect_s": collecting},
    )
    assert not report.failed, report.lines()
    del kept
