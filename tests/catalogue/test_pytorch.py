"""Entries of PyTorch against PyTorch itself, as far as a CPU goes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import memtriage
from memtriage.model.holders import HolderOutcome


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
