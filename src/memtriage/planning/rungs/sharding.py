"""Shard weights, gradients and optimizer state over the GPUs of the job (FSDP2)."""

from __future__ import annotations

from torch import nn

from memtriage.planning.changes import Change, Rung
from memtriage.planning.facts import Facts, inner_optimizer
from memtriage.planning.rungs.checkpointing import in_python
from memtriage.prediction.build import Built


def rung(world_size: int) -> Rung:
    """The rung for a job of so many GPUs."""

    def offer(facts: Facts) -> Change | str:
        if world_size == 1:
            return "the job has one GPU: give world_size, the number of GPUs, and FSDP2 is tried too"
        if facts.parallel:
            return f"the model is wrapped by {facts.parallel}: what `build` returns without is sharded"
        level = next((level for level in facts.levels if set(level.blocks) <= facts.called), None)
        blocks = () if level is None else level.blocks

        loop = "" if level is None else f"for block in {in_python(level)}:\n    fully_shard(block)\n"
        return Change(
            rung="sharding",
            action=f"FSDP2 over {world_size} GPUs",
            speed="the weights of every layer are gathered in forward and again in backward: low with fast "
            "links between the GPUs (M9)",
            maths="same",
            maths_note="gradients are averaged over the GPUs, as with DDP",
            code={
                "torch": f"from torch.distributed.fsdp import fully_shard\n{loop}fully_shard(model)\n"
                "# before the optimizer is made",
                "trainer": 'TrainingArguments(fsdp="full_shard auto_wrap", fsdp_config={"version": 2})',
                "accelerate": "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))",
                "lightning": "Trainer(strategy=ModelParallelStrategy())  # and fully_shard in "
                "configure_model()",
            },
            edit=lambda built: _sharded(built, blocks),
            outermost=True,
        )

    return Rung("sharding", "M9", offer)


def _sharded(built: Built, blocks: tuple[str, ...]) -> Built:
    from torch.distributed.fsdp import fully_shard

    model: nn.Module = built.model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name in blocks:
        fully_shard(model.get_submodule(name))
    fully_shard(model)
    sharded = dict(model.named_parameters())
    for optimizer in map(inner_optimizer, built.optimizers):
        for group in optimizer.param_groups:
            group["params"] = [sharded[names[id(parameter)]] for parameter in group["params"]]
        optimizer.state.clear()
    return built
