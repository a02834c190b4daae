"""FSDP2: for which jobs, what is written, and that optimizers train the sharded parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memtriage.planning.facts import Facts, RepeatedBlocks
from memtriage.planning.rungs.sharding import rung
from memtriage.prediction.build import Built
from support.training_jobs import last

LAYERS = RepeatedBlocks(("layers",), ("layers.0", "layers.1"), False)
STAGES = RepeatedBlocks(("stages",), ("stages.0", "stages.1"), False)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("called", "loop"),
    [
        ((), ""),
        (("layers.0", "layers.1"), "for block in model.layers:\n    fully_shard(block)\n"),
        (("stages.0", "layers.0", "layers.1"), "for block in model.layers:\n    fully_shard(block)\n"),
    ],
)
def test_what_is_written_for_the_outermost_blocks_that_are_called(called: tuple[str, ...], loop: str) -> None:
    facts = Facts(levels=(STAGES, LAYERS), called=frozenset(called))
    change = last(rung(8), facts)
    assert change.code["torch"] == (
        f"from torch.distributed.fsdp import fully_shard\n{loop}fully_shard(model)\n"
        "# before the optimizer is made"
    )
    assert change.code.keys() == {"torch", "trainer", "accelerate", "lightning"}
    assert (change.rung, change.action, change.maths) == ("sharding", "FSDP2 over 8 GPUs", "same")
    assert change.outermost


@pytest.mark.usefixtures("one_rank")
def test_blocks_and_model_are_sharded_and_their_parameters_trained() -> None:
    from torch.distributed.fsdp import FSDPModule

    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW([{"params": model[:2].parameters()}, {"params": model[2].parameters()}])
    order = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    built = Built(model, (SimpleNamespace(optimizer=optimizer),), lambda: None)  # type: ignore[arg-type]
    blocks = RepeatedBlocks(("",), ("0", "1"), False)
    change = last(rung(2), Facts(levels=(blocks,), called=frozenset(blocks.blocks)))
    assert change.edit(built) is built
    assert [isinstance(each, FSDPModule) for each in (model, *model)] == [True, True, True, False]
    sharded = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [[sharded[id(each)] for each in group["params"]] for group in optimizer.param_groups] == order
    assert not optimizer.state
