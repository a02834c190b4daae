"""Reading the CUDA allocator, on a stand-in for torch: what is asked, what is left alone, what is unknown."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from memtriage.model.blocks import DeviceCounters
from memtriage.observe import cuda
from memtriage.observe.cuda import AllocationHistory, allocation_site, parse_counters, parse_segments

MIB = 1 << 20


class FakeCuda:
    """As much of torch, with CUDA initialized, as `observe.cuda` uses; notes what was called."""

    def __init__(self, backend: str = "native", devices: int = 1, contexts: tuple[int, ...] = (0,)) -> None:
        self.initialized = True
        self.recording = False
        self.trace_lengths = [0]
        self.recorded: list[dict[str, Any]] = []
        self.snapshots: list[dict[str, Any]] = []
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.fraction = 1.0
        self.asked_stats: list[int] = []
        self.stats = {
            index: {"reserved_bytes": {"all": {"current": 0, "peak": 0}}} for index in range(devices)
        }
        self.segments: list[dict[str, Any]] = []
        self.torch = ModuleType("torch")
        self.torch._C = SimpleNamespace(
            _cuda_hasPrimaryContext=contexts.__contains__,
            _cuda_memoryStats=self._memory_stats,
            _cuda_isHistoryEnabled=lambda: self.recording,
            _cuda_attach_out_of_memory_observer=self.observers.append,
        )
        self.torch.cuda = SimpleNamespace(
            is_initialized=lambda: self.initialized,
            get_allocator_backend=lambda: backend,
            device_count=lambda: devices,
            current_device=lambda: 0,
            get_device_properties=lambda device: SimpleNamespace(total_memory=1000),
            get_per_process_memory_fraction=lambda device: self.fraction,
            memory_snapshot=self._memory_snapshot,
            memory=SimpleNamespace(
                _record_memory_history=self._record,
                _snapshot=lambda: {"device_traces": [[0] * length for length in self.trace_lengths]},
            ),
        )

    def _memory_stats(self, device: int) -> dict[str, Any]:
        self.asked_stats.append(device)
        return self.stats[device]

    def _memory_snapshot(
        self, mempool_id: object = None, include_traces: bool = True
    ) -> list[dict[str, Any]]:
        self.snapshots.append({"include_traces": include_traces})
        return self.segments

    def _record(self, **options: Any) -> None:
        self.recorded.append(options)
        self.recording = options["enabled"] is not None


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeCuda]:
    def make(**options: Any) -> FakeCuda:
        fake = FakeCuda(**options)
        monkeypatch.setitem(sys.modules, "torch", fake.torch)
        monkeypatch.setitem(sys.modules, "torch.cuda", fake.torch.cuda)
        monkeypatch.setattr(cuda, "_oom_dispatch", cuda._OomDispatch())
        return fake

    return make


# --- before CUDA is initialized -----------------------------------------------------------------------------


def test_importing_and_asking_imports_no_torch() -> None:
    code = (
        "import sys; from memtriage.observe import cuda, driver; "
        "assert not cuda.initialized() and cuda.devices() == [] and cuda.segments() == []; "
        "assert driver.used(0) is None and driver.driver_use(0) is None; "
        "assert 'torch' not in sys.modules and 'pynvml' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_cuda_all_is_unknown_and_nothing_initialized() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("another test of this process has initialized CUDA")
    assert not cuda.initialized()
    assert cuda.counters(0) == DeviceCounters()
    assert (cuda.backend(), cuda.capacity(0), cuda.per_process_limit(0)) == (None, None, None)
    assert not cuda.has_context(0) and not cuda.capturing()
    assert cuda.devices() == [] == cuda.segments()
    assert not AllocationHistory().start()
    assert not cuda.attach_oom_observer(print)
    assert not torch.cuda.is_initialized()


def test_a_torch_that_is_half_imported_counts_as_not_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.cuda", ModuleType("torch.cuda"))
    assert not cuda.initialized()


# --- devices and counters -----------------------------------------------------------------------------------


def test_devices_are_those_whose_allocator_was_used(install: Callable[..., FakeCuda]) -> None:
    fake = install(devices=4, contexts=(0, 2, 3))
    fake.stats[2]["reserved_bytes"]["all"]["current"] = 5
    fake.stats[3]["reserved_bytes"]["all"]["peak"] = 5
    assert cuda.devices() == [2, 3]
    assert 1 not in fake.asked_stats


def test_with_another_backend_a_context_is_use(install: Callable[..., FakeCuda]) -> None:
    install(backend="cudaMallocAsync", devices=3, contexts=(1,))
    assert cuda.devices() == [1]


STATS = {
    **{
        name: {"all": {"current": value, "peak": value + 1}, "small_pool": {"current": 99}}
        for name, value in (
            ("allocated_bytes", 10),
            ("reserved_bytes", 20),
            ("requested_bytes", 8),
            ("active_bytes", 12),
            ("inactive_split_bytes", 4),
        )
    },
    "num_alloc_retries": 3,
    "num_ooms": 1,
}


def test_native_counters() -> None:
    assert parse_counters(STATS, "native") == DeviceCounters(
        allocated=10,
        reserved=20,
        requested=8,
        active=12,
        peak_allocated=11,
        peak_reserved=21,
        retries=3,
        ooms=1,
        inactive_split=4,
    )


def test_statistics_that_a_backend_lacks_are_none_not_zero() -> None:
    assert parse_counters(STATS, "cudaMallocAsync") == DeviceCounters(
        allocated=10, reserved=20, peak_allocated=11, peak_reserved=21
    )
    assert parse_counters({}, "native") == DeviceCounters()


def test_a_pluggable_allocator_without_statistics_is_unknown(install: Callable[..., FakeCuda]) -> None:
    fake = install(backend="pluggable")

    def refuse(device: int) -> dict[str, Any]:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    fake.torch._C._cuda_memoryStats = refuse
    assert cuda.counters(0) == DeviceCounters()
    assert cuda.segments() is None


def test_counters_fall_back_to_the_public_call(install: Callable[..., FakeCuda]) -> None:
    fake = install()
    del fake.torch._C._cuda_memoryStats
    fake.torch.cuda.memory_stats_as_nested_dict = lambda device: STATS
    assert cuda.counters(0).allocated == 10


def test_the_limit_is_known_only_where_a_fraction_was_set(install: Callable[..., FakeCuda]) -> None:
    fake = install()
    assert cuda.per_process_limit(0) is None
    fake.fraction = 0.25
    assert (cuda.capacity(0), cuda.per_process_limit(0)) == (1000, 250)


@pytest.mark.parametrize(
    ("conf", "expected", "splits"),
    [
        ("", False, True),
        ("expandable_segments:True", True, True),
        ("max_split_size_mb:64, expandable_segments : True", True, False),
        ("expandable_segments:False,max_split_size_mb:64", False, False),
    ],
)
def test_settings_are_those_in_force(
    conf: str, expected: bool, splits: bool, install: Callable[..., FakeCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = install()
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
    assert cuda.expandable_segments() == expected  # an older torch
    assert cuda.splits_any_block() == splits
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    fake.torch._C._accelerator_getAllocatorSettings = lambda: conf
    assert cuda.expandable_segments() == expected
    assert cuda.splits_any_block() == splits
    fake.initialized = False
    assert not cuda.expandable_segments()
    assert cuda.splits_any_block()


# --- segments -----------------------------------------------------------------------------------------------

RAW: dict[str, Any] = {
    "device": 1,
    "address": 4096,
    "total_size": 2560,
    "stream": 7,
    "segment_type": "small",
    "segment_pool_id": (0, 3),
    "is_expandable": True,
    "something_new": object(),
    "blocks": [
        {"address": 4096, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": []},
        {"address": 4608, "size": 512, "requested_size": 400, "state": "active_pending_free", "new": 1},
        {"address": 5120, "size": 512, "requested_size": 300, "state": "active_awaiting_free"},
        {"address": 5632, "size": 1024, "requested_size": 300, "state": "inactive"},
    ],
}


def test_segments_are_read_with_all_states() -> None:
    (segment,) = parse_segments([RAW])
    assert (segment.device, segment.stream, segment.pool, segment.page) == (1, 7, (0, 3), 2 * MIB)
    states = [(block.state, block.requested) for block in segment.blocks]
    assert states == [("active", 500), ("awaiting", 400), ("awaiting", 300), ("free", 0)]
    assert segment.end == segment.blocks[-1].end


def test_missing_keys_are_tolerated() -> None:
    (segment,) = parse_segments([{"address": 64, "blocks": [{"size": 512}, {"size": 512}]}])
    assert (segment.device, segment.size, segment.pool, segment.expandable) == (0, 1024, (0, 0), False)
    assert [block.address for block in segment.blocks] == [64, 576]
    assert segment.page is None


def test_large_expandable_segments_have_large_pages() -> None:
    (segment,) = parse_segments([{**RAW, "segment_type": "large"}])
    assert segment.page == 20 * MIB


def test_segments_ask_for_no_traces_and_for_one_device(install: Callable[..., FakeCuda]) -> None:
    fake = install()
    fake.segments = [RAW, {**RAW, "device": 0}]
    held = cuda.segments(1)
    assert held is not None and [segment.device for segment in held] == [1]
    assert fake.snapshots == [{"include_traces": False}]


def test_segments_on_a_torch_without_the_option(install: Callable[..., FakeCuda]) -> None:
    fake = install()
    fake.torch.cuda.memory_snapshot = lambda mempool_id=None: [RAW]
    held = cuda.segments()
    assert held is not None and len(held) == 1


# --- history ------------------------------------------------------------------------------------------------


def test_history_is_switched_on_without_a_trace_and_put_back(install: Callable[..., FakeCuda]) -> None:
    fake = install()
    history = AllocationHistory()
    assert history.start()
    assert fake.recorded == [{"enabled": "state", "context": "state", "stacks": "python", "max_entries": 1}]
    history.stop()
    history.stop()
    assert [options["enabled"] for options in fake.recorded] == ["state", None]


def test_another_tools_recording_is_left_alone(install: Callable[..., FakeCuda]) -> None:
    fake = install()
    fake.recording = True
    history = AllocationHistory()
    assert history.start()
    history.stop()
    assert fake.recording and fake.recorded == []


def test_a_recording_taken_over_in_between_is_left_alone(install: Callable[..., FakeCuda]) -> None:
    fake = install()
    history = AllocationHistory()
    history.start()
    fake.trace_lengths = [1, 40]
    history.stop()
    assert fake.recording


def test_a_recording_switched_off_in_between_is_not_touched(install: Callable[..., FakeCuda]) -> None:
    fake = install()
    history = AllocationHistory()
    history.start()
    fake.recording = False
    history.stop()
    assert len(fake.recorded) == 1


@pytest.mark.parametrize("backend", ["native", "cudaMallocAsync"])
def test_nothing_is_switched_where_torch_does_not_tell_or_cannot(
    install: Callable[..., FakeCuda], backend: str
) -> None:
    fake = install(backend=backend)
    if backend == "native":
        del fake.torch._C._cuda_isHistoryEnabled
    assert not AllocationHistory().start()
    assert fake.recorded == []


# --- allocation sites ---------------------------------------------------------------------------------------

SITE = "/env/lib/python3.12/site-packages"


def frame(filename: str, line: int = 1, name: str = "f") -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


SITES = {
    "script": (["/home/u/train.py"], "/home/u", "train.py"),
    "below": ([f"{SITE}/torch/nn/linear.py", "/home/u/pkg/net.py"], "/home/u", "pkg/net.py"),
    "elsewhere": ([f"{SITE}/torch/a.py", "/other/net.py"], "/home/u", "net.py"),
    "user before library": ([f"{SITE}/transformers/b.py", "/home/u/train.py"], "/home/u", "train.py"),
    "library": ([f"{SITE}/torch/a.py", f"{SITE}/transformers/b.py"], None, "b.py"),
    "torch alone": ([f"{SITE}/torch/a.py", f"{SITE}/torch/b.py"], None, "a.py"),
    "stdlib": ([f"{SITE}/torch/a.py", "/usr/lib/python3.12/runpy.py"], None, "runpy.py"),
    "environment in the script's folder": (
        ["/home/u/.venv/lib/python3.12/site-packages/x/a.py", "/home/u/train.py"], "/home/u", "train.py",
    ),
    "installed package run with -m": (
        [f"{SITE}/other/a.py", f"{SITE}/mypkg/train.py"], f"{SITE}/mypkg", "train.py",
    ),
    "compiled code": (
        ["/tmp/torchinductor_root/ab/cab.py", "<eval_with_key>.3", "/home/u/train.py"], "/home/u", "train.py",
    ),
    "typed in": (["??", "/pytorch/c10/core.cpp", "<stdin>"], None, "<stdin>"),
    "memtriage": ([cuda.__file__, "/home/u/train.py"], "/home/u", "train.py"),
    "this torch": ([torch.__file__, f"{SITE}/lib/b.py"], None, "b.py"),
}  # fmt: skip


@pytest.mark.parametrize(("filenames", "root", "expected"), SITES.values(), ids=SITES)
def test_allocation_site(filenames: list[str], root: str | None, expected: str) -> None:
    assert allocation_site([frame(name) for name in filenames], root) == f"{expected}:1 in f"


def test_allocation_site_of_no_frames_is_unknown() -> None:
    assert allocation_site([]) is None


def test_blocks_carry_their_site() -> None:
    block = {"size": 512, "state": "active_allocated", "frames": [frame("/u/t.py", 8, "step")]}
    (segment,) = parse_segments([{"address": 0, "blocks": [block]}], script_root="/u")
    assert segment.blocks[0].site == "t.py:8 in step"


# --- out of memory ------------------------------------------------------------------------------------------


class Watcher:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int, int]] = []

    def on_oom(self, device: int, requested: int, limit: int, free: int) -> None:
        self.seen.append((device, requested, limit, free))


def test_one_attached_observer_calls_the_last_callback(
    install: Callable[..., FakeCuda],
) -> None:
    fake = install()
    first, second = Watcher(), Watcher()
    assert cuda.attach_oom_observer(first.on_oom) and cuda.attach_oom_observer(second.on_oom)
    (observer,) = fake.observers
    observer(0, 1, 2, 3)
    assert (first.seen, second.seen) == ([], [(0, 1, 2, 3)])


def test_the_callback_is_held_weakly_and_can_be_taken_away(install: Callable[..., FakeCuda]) -> None:
    fake = install()
    watcher = Watcher()
    cuda.attach_oom_observer(watcher.on_oom)
    seen = watcher.seen
    cuda.attach_oom_observer(None)
    fake.observers[0](0, 1, 2, 3)
    cuda.attach_oom_observer(watcher.on_oom)
    del watcher
    gc.collect()
    fake.observers[0](0, 1, 2, 3)
    assert seen == []


def test_a_failing_callback_does_not_replace_the_scripts_error(
    install: Callable[..., FakeCuda], capsys: pytest.CaptureFixture[str]
) -> None:
    fake = install()

    def fail(device: int, requested: int, limit: int, free: int) -> None:
        raise ValueError("mine")

    cuda.attach_oom_observer(fail)
    fake.observers[0](0, 1, 2, 3)
    assert "the out-of-memory observer failed (ValueError: mine)" in capsys.readouterr().err


def test_the_observer_under_its_other_name_or_none(install: Callable[..., FakeCuda]) -> None:
    watcher = Watcher()
    fake = install()
    fake.torch._C._cuda_attachOutOfMemoryObserver = fake.torch._C._cuda_attach_out_of_memory_observer
    del fake.torch._C._cuda_attach_out_of_memory_observer
    assert cuda.attach_oom_observer(watcher.on_oom) and len(fake.observers) == 1
    fake = install()
    del fake.torch._C._cuda_attach_out_of_memory_observer
    assert not cuda.attach_oom_observer(watcher.on_oom)


def test_a_backend_without_observers_gets_none(install: Callable[..., FakeCuda]) -> None:
    fake = install(backend="cudaMallocAsync")
    assert not cuda.attach_oom_observer(Watcher().on_oom)
    assert fake.observers == []


def test_without_a_probe_the_current_device_has_a_context(install: Callable[..., FakeCuda]) -> None:
    fake = install(devices=2, contexts=())
    del fake.torch._C._cuda_hasPrimaryContext
    assert cuda.has_context(0) is True
    assert cuda.has_context(1) is False


@pytest.mark.parametrize(("hip", "is_rocm"), [(None, False), ("6.4", True)])
def test_a_build_for_rocm_is_told_by_its_version(
    install: Callable[..., FakeCuda], hip: str | None, is_rocm: bool
) -> None:
    install().torch.version = SimpleNamespace(hip=hip)
    assert cuda.is_rocm() is is_rocm


def test_frames_of_the_user_are_those_that_are_nobody_elses() -> None:
    assert cuda.is_of_user(frame("/home/u/train.py"), "/home/u")
    assert not cuda.is_of_user(frame(f"{SITE}/transformers/b.py"), "/home/u")
    assert cuda.is_of_user(frame(f"{SITE}/mypkg/train.py"), f"{SITE}/mypkg")
