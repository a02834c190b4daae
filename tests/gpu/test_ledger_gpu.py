"""The allocator, the driver and the ledger on a real GPU."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import is_fake

from memtriage.account.gpu_ledger import CPP_ONLY, CUBLAS, gpu_ledger, outside_allocator, segment_totals
from memtriage.model.blocks import DriverUse, Segment
from memtriage.model.census import Owner, StorageRecord
from memtriage.model.ledger import Ledger
from memtriage.observe import cuda, driver
from memtriage.observe.cuda import AllocationHistory
from support.paths import named

MIB = 1 << 20


@contextmanager
def recorded() -> Iterator[AllocationHistory]:
    history = AllocationHistory()
    history.start()
    yield history
    history.stop()


def live_segments(device: int = 0) -> list[Segment]:
    segments = cuda.segments(device, script_root=os.path.dirname(__file__))
    assert segments is not None
    return segments


def driver_use() -> DriverUse:
    found = driver.driver_use(0)
    assert found is not None
    return found


def storages(owned: dict[int, tuple[Owner, str]]) -> list[StorageRecord]:
    """Every CUDA storage that a tensor known to `gc` has, with its owner by address."""
    records: dict[int, StorageRecord] = {}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor) and tensor.is_cuda and not is_fake(tensor):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            owner, holder = owned.get(address, ("variable", "a variable"))
            records[address] = StorageRecord(
                device=str(tensor.device),
                address=address,
                nbytes=storage.nbytes(),
                owner=owner,
                path=named(holder),
            )
    return list(records.values())


def owners(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, tuple[Owner, str]]:
    owned: dict[int, tuple[Owner, str]] = {}
    for name, parameter in model.named_parameters():
        owned[parameter.untyped_storage().data_ptr()] = ("parameter", name)
        if parameter.grad is not None:
            owned[parameter.grad.untyped_storage().data_ptr()] = ("gradient", f"{name}.grad")
        for key, value in optimizer.state[parameter].items():
            if value.is_cuda:
                owned[value.untyped_storage().data_ptr()] = ("optimizer state", f"{name}: {key}")
    return owned


def bytes_of(ledger: Ledger, row: str, owner: str | None = None) -> int:
    return sum(
        ledger_row.bytes for ledger_row in ledger.rows if ledger_row.row == row and ledger_row.owner == owner
    )


def test_the_ledger_of_a_training_step_closes_against_the_driver() -> None:
    layers = [torch.nn.Linear(2048, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    baseline = outside_allocator(driver_use(), torch.cuda.memory_reserved(0))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(0)
    use, segments, records = driver_use(), live_segments(), storages(owners(model, optimizer))
    ledger = gpu_ledger("cuda:0", segments, records, use, baseline)

    assert sum(row.bytes for row in ledger.rows) == ledger.total == use.used == total - free
    assert bytes_of(ledger, "unexplained") == 0
    parameters = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    assert bytes_of(ledger, "requested", "parameter") == parameters
    assert bytes_of(ledger, "requested", "gradient") == parameters
    assert bytes_of(ledger, "requested", "optimizer state") == 2 * parameters
    workspaces = [block for segment in segments for block in segment.blocks if block.requested == 32 * MIB]
    assert bytes_of(ledger, "requested", CUBLAS) >= 32 * MIB * len(workspaces)
    allocated = torch.cuda.memory_allocated(0)
    assert bytes_of(ledger, "requested", CPP_ONLY) <= allocated // 200
    assert bytes_of(ledger, "foreign memory") == 0


def test_a_hopper_keeps_cublas_workspaces_of_32_mib() -> None:
    if torch.cuda.get_device_capability(0) != (9, 0) or "CUBLAS_WORKSPACE_CONFIG" in os.environ:
        pytest.skip("needs a Hopper with the default workspace")
    square = torch.randn(512, 512, device="cuda")
    product = square @ square
    sizes = [
        block.requested for segment in live_segments() for block in segment.blocks if block.state == "active"
    ]
    if 32 * MIB not in sizes:
        pytest.skip("this torch does not keep workspaces")
    ledger = gpu_ledger("cuda:0", live_segments(), storages({}), driver_use())
    assert bytes_of(ledger, "requested", CUBLAS) >= 32 * MIB
    del product


def test_counters_equal_memory_stats() -> None:
    kept = [torch.empty(1000, device="cuda") for _ in range(5)]
    found, stats = cuda.counters(0), torch.cuda.memory_stats(0)
    assert found.allocated == stats["allocated_bytes.all.current"] > 0
    assert found.reserved == stats["reserved_bytes.all.current"]
    assert found.requested == stats["requested_bytes.all.current"]
    assert found.active == stats["active_bytes.all.current"]
    assert found.peak_allocated == stats["allocated_bytes.all.peak"]
    assert found.peak_reserved == stats["reserved_bytes.all.peak"]
    assert (found.retries, found.ooms) == (stats["num_alloc_retries"], stats["num_ooms"])
    del kept


def test_segments_equal_memory_snapshot() -> None:
    kept = [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (1, 3, 30)]
    del kept[1]
    states = {"active_allocated": "active", "inactive": "free"}
    expected = [
        (
            (
                segment["device"],
                segment["address"],
                segment["total_size"],
                segment["stream"],
                tuple(segment["segment_pool_id"]),
            ),
            [(b["address"], b["size"], states.get(b["state"], "awaiting")) for b in segment["blocks"]],
        )
        for segment in torch.cuda.memory_snapshot()
    ]
    held = cuda.segments()
    assert held is not None
    assert expected == [
        (
            (segment.device, segment.address, segment.size, segment.stream, segment.pool),
            [(block.address, block.size, block.state) for block in segment.blocks],
        )
        for segment in held
    ]
    for segment in held:
        assert sum(block.size for block in segment.blocks) == segment.size


def test_segment_totals_equal_the_counters() -> None:
    kept = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (100, 3 * MIB, 7 * MIB, 40 * MIB)]
    del kept[2]
    totals, stats = segment_totals(live_segments()), torch.cuda.memory_stats(0)
    assert totals.reserved == stats["reserved_bytes.all.current"]
    assert totals.allocated == stats["allocated_bytes.all.current"]
    assert totals.requested == stats["requested_bytes.all.current"]
    assert totals.stranded == stats["inactive_split_bytes.all.current"]
    assert kept[0].nbytes == 100


def test_a_freed_block_that_a_stream_still_uses_awaits_it() -> None:
    side = torch.cuda.Stream()
    block = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)
        block.add_(1)
    block.record_stream(side)
    del block
    ledger = gpu_ledger("cuda:0", live_segments(), [], driver_use())
    assert bytes_of(ledger, "awaiting stream events") == 30 * MIB
    torch.cuda.synchronize()


def test_a_private_pool_has_rows_of_its_own() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    ledger = gpu_ledger("cuda:0", live_segments(), storages({}), driver_use())
    details = [row.detail or "" for row in ledger.rows if row.row == "requested" and row.owner == "variable"]
    assert any(detail.startswith("private pools: ") for detail in details)
    assert segment_totals(live_segments()).private_pools >= inside.nbytes
    del inside  # before its pool


def test_no_context_is_made_on_another_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    last = torch.cuda.device_count() - 1
    if cuda.has_context(last):
        pytest.skip("another test has used the last device")
    kept = torch.empty(1, device="cuda:0")
    assert last not in cuda.devices()
    assert driver.used(last) is None and driver.driver_use(last) is None
    assert not cuda.has_context(last)
    del kept


def test_the_driver_counts_at_least_what_the_allocator_holds() -> None:
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    use = driver_use()
    free, total = torch.cuda.mem_get_info(0)
    assert (use.total, use.used) == (total, total - free) and driver.used(0) == use.used
    assert use.used >= torch.cuda.memory_reserved(0) >= kept.nbytes
    assert use.own is None or use.own >= torch.cuda.memory_reserved(0)
    assert cuda.capacity(0) == torch.cuda.get_device_properties(0).total_memory


# --- history ------------------------------------------------------------------------------------------------


def recording() -> bool:
    return bool(torch._C._cuda_isHistoryEnabled())


@pytest.fixture
def history_off() -> Iterator[None]:
    torch.cuda.memory._record_memory_history(enabled=None)
    yield
    torch.cuda.memory._record_memory_history(enabled=None)


def test_history_names_the_site_keeps_no_trace_and_is_put_back(history_off: None) -> None:
    with recorded() as history:
        assert recording() and history.start()
        kept = [torch.empty(3 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
        traces = torch.cuda.memory._snapshot()["device_traces"]
        assert all(len(trace) <= 1 for trace in traces)
        sites = {
            block.address: block.site
            for segment in live_segments()
            for block in segment.blocks
            if block.state == "active"
        }
        assert all(
            (sites[tensor.data_ptr()] or "").startswith(os.path.basename(__file__) + ":") for tensor in kept
        )
    assert not recording()


def test_another_tools_recording_goes_on(history_off: None) -> None:
    torch.cuda.memory._record_memory_history(enabled="all", max_entries=1000)
    with recorded():
        kept = [torch.empty(3 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    assert recording()
    assert len(torch.cuda.memory._snapshot()["device_traces"][0]) >= len(kept)


def test_a_recording_begun_after_ours_goes_on(history_off: None) -> None:
    with recorded():
        torch.cuda.memory._record_memory_history(enabled="all", max_entries=1000)
        kept = [torch.empty(3 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    assert recording()
    del kept


# --- out of memory ------------------------------------------------------------------------------------------


def test_the_observer_sees_the_failing_request_and_can_read_the_segments() -> None:
    seen: list[tuple[int, int, int, int, int]] = []

    def on_oom(device: int, requested: int, limit: int, free: int) -> None:
        seen.append((device, requested, limit, free, len(live_segments())))

    total = torch.cuda.get_device_properties(0).total_memory
    kept = torch.empty(MIB, device="cuda")
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        limit = cuda.per_process_limit(0)
        assert limit is not None and abs(limit - total // 4) <= 1
        assert cuda.attach_oom_observer(on_oom)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total // 2, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        cuda.attach_oom_observer(None)
    ((device, requested, reported_limit, free, count),) = seen
    assert device == 0 and total // 2 <= requested < total // 2 + 4 * MIB
    assert abs(reported_limit - limit) <= 1 and 0 < free <= total and count >= 1
    assert cuda.per_process_limit(0) is None
    del kept


# --- other configurations, each in a process of its own -----------------------------------------------------


def run_script(code: str, configuration: str) -> dict[str, int | bool | None]:
    environment = {
        **os.environ,
        "PYTORCH_CUDA_ALLOC_CONF": configuration,
        "PYTORCH_ALLOC_CONF": configuration,
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=300
    )
    result: dict[str, int | bool | None] = json.loads(done.stdout.splitlines()[-1])
    return result


RELEASABLE = """
import json, random, torch
from memtriage.account.gpu_ledger import segment_totals
from memtriage.observe import cuda
random.seed(1)
sizes = [random.choice([1 << 10, 300 << 10, 3 << 20, 11 << 20, 47 << 20]) for _ in range(300)]
kept = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
kept = [block for block in kept if random.random() < 0.2]
before = segment_totals(cuda.segments(0))
torch.cuda.empty_cache()
after = torch.cuda.memory_reserved(0)
print(json.dumps({
    "expandable": any(segment.expandable for segment in cuda.segments(0)),
    "reserved": before.reserved, "predicted": before.releasable, "given_back": before.reserved - after,
}))
"""


@pytest.mark.parametrize("expandable", [False, True])
def test_releasable_is_what_empty_cache_gives_back(expandable: bool) -> None:
    prediction = run_script(RELEASABLE, f"expandable_segments:{expandable}")
    if expandable and not prediction["expandable"]:
        pytest.skip("expandable segments are not supported here")
    assert prediction["predicted"] == prediction["given_back"] != 0


ASYNC = """
import json, torch
from memtriage.account.gpu_ledger import gpu_ledger
from memtriage.model.census import StorageRecord
from memtriage.observe import cuda, driver
kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
record = StorageRecord(device="cuda:0", address=kept.data_ptr(), nbytes=kept.nbytes, owner="variable")
use, counters = driver.driver_use(0), cuda.counters(0)
ledger = gpu_ledger("cuda:0", cuda.segments(0), [record], use)
print(json.dumps({
    "native": cuda.backend() == "native", "devices": len(cuda.devices()), "segments": cuda.segments(0),
    "allocated": counters.allocated, "requested": counters.requested,
    "closed": sum(row.bytes for row in ledger.rows) == use.used,
    "variable": sum(row.bytes for row in ledger.rows if row.owner == "variable"),
    "unexplained": sum(row.bytes for row in ledger.rows if row.row == "unexplained"),
    "history": cuda.AllocationHistory().start(), "observer": cuda.attach_oom_observer(print),
}))
"""


def test_cuda_malloc_async_is_accounted_with_what_it_tells() -> None:
    prediction = run_script(ASYNC, "backend:cudaMallocAsync")
    assert prediction == {
        "native": False,
        "devices": 1,
        "segments": None,
        "allocated": 64 * MIB,
        "requested": None,
        "closed": True,
        "variable": 64 * MIB,
        "unexplained": 0,
        "history": False,
        "observer": False,
    }
