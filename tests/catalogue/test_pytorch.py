"""Entries of PyTorch against PyTorch itself, as far as a CPU goes."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import memtriage
from memtriage.catalogue import pytorch as pytorch_entries
from memtriage.model.holders import HolderOutcome
from memtriage.observe.host import PinnedStats
from support.holder_looks import ENTRIES, clear_places, look, paths
from support.holder_standins import NBYTES, Stage, tensor


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[object]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def clear(name: str) -> HolderOutcome:
    # Tests before these, in the same process, may have left graphs behind.
    (outcome,) = memtriage.clear_caches([name], between_steps=True).entries
    return outcome


def test_fsdp2_buffers_are_cleared_and_gradients_stay(
    mesh: object,
) -> None:
    from torch.distributed.fsdp import fully_shard

    def gradient(clearing: bool) -> tuple[torch.Tensor, HolderOutcome | None]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        for layer in model:
            fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
        fully_shard(model, mesh=mesh)  # type: ignore[arg-type]
        outcome = None
        for last in (False, True):
            model.set_is_last_backward(last)
            model(torch.ones(4, 64) * (1 + last)).square().sum().backward()
            if clearing and not last:
                outcome = clear("fsdp2.communication")
        return model[0].weight.grad.to_local(), outcome

    plain, _ = gradient(False)
    cleared, outcome = gradient(True)
    assert outcome is not None and outcome.status == "cleared"
    assert outcome.before["cpu"] >= 64 * 64 * 4 and outcome.freed == outcome.before
    assert torch.equal(plain, cleared)


def test_compiled_code_lets_go_of_what_it_was_specialized_on() -> None:
    outcome = clear("torch.dynamo")
    model = torch.nn.Linear(3, 3)
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(1, 3)).sum().backward()
    reference = weakref.ref(model)
    assert "torch.dynamo" in [holder.name for holder in memtriage.clear_caches().skipped]
    outcome = clear("torch.dynamo")
    assert (outcome.status, outcome.reason) == ("cleared", None)
    assert clear("torch.dynamo").status == "absent"
    del model, compiled
    gc.collect()
    assert reference() is None


# On stand-ins


def test_every_state_of_fsdp_s_objects_is_told(stage: Stage) -> None:
    stage.module("torch.distributed.fsdp")
    states = {name: tensor() for name in ("all_gather_state", "reduce_scatter_state", "_all_reduce_state")}
    for kind in ("FSDPCommContext", "FSDPParamGroup", "FSDPState"):
        owner = stage.keep(type(kind, (), {})())
        owner.__dict__.update(states, reduce_scatter_states=[], mesh=tensor())
    assert sorted(paths("fsdp2.communication")) == sorted(
        f"{kind}.{name}" for kind in ("FSDPCommContext", "FSDPParamGroup") for name in states
    )
    assert clear_places("fsdp2.communication") == 6
    assert owner.__dict__["all_gather_state"] is not None


def test_the_offload_pool_is_emptied_by_its_own_function_where_there_is_one(stage: Stage) -> None:
    pool, registry, tidied = {1: [tensor()]}, {2: [tensor()]}, []
    module = "torch._functorch._activation_offloading.offload_ops"
    stage.module(module, _pinned_pool=pool, _wait_registry=registry, _pool_clear=lambda: tidied.append(1))
    assert paths("torch.offload_pool") == [f"{module}._pinned_pool", f"{module}._wait_registry"]
    assert clear_places("torch.offload_pool") == 2
    assert (len(pool), registry, tidied) == (1, {}, [1])


@pytest.mark.parametrize(
    ("stats", "nbytes"),
    [
        (None, None),
        (PinnedStats(owned=0, active=0, cached=None), None),
        (PinnedStats(owned=5, active=5, cached=0), None),
        (PinnedStats(owned=5, active=3, cached=2), {"host": 2}),
        (PinnedStats(owned=5, active=3, cached=None), {}),  # before torch 2.13
    ],
)
def test_pinned_memory_is_told_where_some_of_it_may_be_free(
    stats: PinnedStats | None, nbytes: dict[str, int] | None, stage: Stage
) -> None:
    stage.patch.setattr(pytorch_entries, "pinned", lambda: stats)
    reading = look("torch.pinned_cache")
    assert (reading.nbytes if reading.places else None) == nbytes


@pytest.mark.parametrize("public", [True, False])
def test_pinned_memory_is_emptied_by_the_function_that_this_torch_has(public: bool, stage: Stage) -> None:
    called: list[str] = []
    if public:
        stage.patch.setattr(
            torch.accelerator, "empty_host_cache", lambda: called.append("new"), raising=False
        )
    else:
        stage.patch.delattr(torch.accelerator, "empty_host_cache", raising=False)
    stage.patch.setattr(torch._C, "_host_emptyCache", lambda: called.append("old"), raising=False)
    clear_all = ENTRIES["torch.pinned_cache"].clear_all
    assert clear_all is not None
    clear_all()
    assert called == ["new" if public else "old"]


def test_only_results_without_a_wait_and_groups_of_nccl_count(stage: Stage) -> None:
    kind = type("AsyncCollectiveTensor", (), {})
    stage.module("torch.distributed._functional_collectives", AsyncCollectiveTensor=kind)
    for completed in (True, False, False):
        stage.keep(kind()).__dict__.update(elem=tensor(), completed=completed)
    reading = look("torch.async_collectives")
    assert (reading.entries, reading.total) == (2, 2 * NBYTES)
    world = types.SimpleNamespace(
        pg_map={1: ("nccl", None), 2: ("gloo", None), 3: ("cpu:gloo,cuda:nccl", None)}
    )
    stage.module("torch.distributed.distributed_c10d", _world=world)
    assert look("torch.nccl").entries == 2


def test_benchmarks_are_told_while_they_run_and_by_their_module(stage: Stage) -> None:
    def frame(function: str, module: str) -> tuple[None, Any]:
        code = types.SimpleNamespace(co_name=function)
        return None, types.SimpleNamespace(f_code=code, f_globals={"__name__": module})

    running = [
        frame("do_bench_cudagraph", "triton.testing"),
        frame("do_bench", "program"),
        frame("run", "triton.testing"),
    ]
    stage.patch.setattr(pytorch_entries, "running_frames", lambda skip: running)
    stage.module("triton")
    stage.patch.delitem(sys.modules, "triton.testing", raising=False)
    assert paths("triton.do_bench") == []
    stage.module("triton.testing")
    assert paths("triton.do_bench") == ["do_bench_cudagraph() is running"]


def test_without_cuda_in_use_there_are_no_workspaces_and_no_trials_of_convolutions(stage: Stage) -> None:
    stage.patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    stage.patch.setattr(torch.backends.cudnn, "benchmark", True)
    for initialized in (False, True):
        stage.patch.setattr(pytorch_entries, "initialized", lambda now=initialized: now)
        assert bool(paths("torch.cublas_workspaces")) == bool(paths("torch.conv_benchmark")) == initialized
    stage.patch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    stage.patch.setattr(torch.backends.cudnn, "benchmark", False)
    assert paths("torch.cublas_workspaces") == paths("torch.conv_benchmark") == []
