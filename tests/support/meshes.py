"""A small transformer's layers in jobs of four ranks, and the bytes of a rank's tensors in one step.

As a script it is one of the ranks: `meshes.py RANK PORT` prints its bytes in each job, over gloo on the CPU.
"""

import functools
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

RANKS = 4
WIDTH = 128
ROWS = 48
MICRO_BATCHES = 4
JOBS = [
    ("shard", "tensor"),
    ("pipeline", "shard"),
    ("pipeline", "tensor"),
    ("replicate", "shard"),
    ("pipeline", "shard", "GPipe"),
    ("pipeline", "tensor", "GPipe"),
    ("shard", "tensor", "selective"),
    ("pipeline", "tensor", "selective"),
    ("FSDP1",),
    ("FSDP1", "original parameters"),
    ("FSDP1", "selective"),
    ("FSDP1", "only gradients"),
    ("FSDP1", "hybrid"),
]
"""Of each job the axes of its mesh, and what else it does."""
REPEATS = 5
"""Steps of a real job, of which the least counts: for an instant gloo's threads hold what they have sent."""
AXES = {"shard", "tensor", "pipeline", "replicate"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rise = nn.Linear(WIDTH, 4 * WIDTH)
        self.fall = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fall(nn.functional.gelu(self.rise(self.norm(x))))


def sharded(blocks, mesh):
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(blocks, mesh=mesh)


def split(blocks, mesh):
    for block in blocks:
        parallelize_module(block, mesh, {"rise": ColwiseParallel(), "fall": RowwiseParallel()})
    return blocks


def flat(blocks, names, device):
    """The blocks under the first FSDP."""
    strategy, mesh = ShardingStrategy.FULL_SHARD, None
    if "only gradients" in names:
        strategy = ShardingStrategy.SHARD_GRAD_OP
    elif "hybrid" in names:
        strategy = ShardingStrategy.HYBRID_SHARD
        mesh = init_device_mesh(device.type, (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    return FullyShardedDataParallel(
        blocks,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=device,
        use_orig_params="original parameters" in names,
        sharding_strategy=strategy,
        device_mesh=mesh,
    )


def policy(context, operator, *arguments, **options):
    """Keep what matrix products make, compute the rest again."""
    kept = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(block):
    return checkpoint_wrapper(
        block, context_fn=functools.partial(create_selective_checkpoint_contexts, policy)
    )


class Live(TorchDispatchMode):
    """Follows the storages that operators make: the most bytes that were alive at once."""

    def __init__(self):
        super().__init__()
        self.made = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come next
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                if storage._cdata not in self.made:
                    self.made[storage._cdata] = StorageWeakRef(storage)
                del storage
        leaf = None
        self.most = max(self.most, self.alive())
        return result

    def alive(self):
        bytes_alive = 0
        for address, weak in list(self.made.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                del self.made[address]
            else:
                bytes_alive += storage.nbytes()
        return bytes_alive


def build_for(names, sizes):
    """Return a build function for such a job; its steps write what they keep and save into `sizes`."""

    def build(device):
        axes = [name for name in names if name in AXES]
        kind = torch.device(device).type
        mesh = init_device_mesh(kind, (2, RANKS // 2), mesh_dim_names=axes) if axes else None
        stage = mesh["pipeline"].get_local_rank() if "pipeline" in names else None
        blocks = nn.Sequential(*[Block() for _ in range(3 - (stage or 0))]).to(device)  # stages differ
        if "tensor" in names:
            split(blocks, mesh["tensor"])
        if "selective" in names:
            blocks = nn.Sequential(*map(checkpointed, blocks))
        if "shard" in names:
            sharded(blocks, mesh if "replicate" in names else mesh["shard"])
        if "FSDP1" in names:
            blocks = flat(blocks, names, torch.device(device))
        # One by one: of blocks that are split by tensor alone, the norms are plain tensors.
        optimizer = torch.optim.AdamW(blocks.parameters(), foreach=False)
        schedule = (
            None if stage is None else scheduled(blocks, stage, mesh["pipeline"].get_group(), device, names)
        )

        def step():
            batch = torch.ones(MICRO_BATCHES * ROWS, WIDTH, device=device)
            with Live() as live:
                if schedule is None:
                    blocks(batch).pow(2).sum().backward()
                elif stage == 0:
                    schedule.step(batch)
                else:
                    schedule.step(target=batch)
            sizes["at once"] = live.most
            sizes["left"] = live.alive()
            optimizer.step()
            sizes["parameters"] = storages(blocks.parameters())
            gradients = [parameter.grad for parameter in blocks.parameters()]
            sizes["gradients"] = storages(gradient for gradient in gradients if gradient is not None)
            states = (state for held in optimizer.state.values() for state in held.values())
            sizes["states"] = storages(state for state in states if state.dim())
            optimizer.zero_grad()

        return blocks, optimizer, step

    return build


def scheduled(blocks, stage, group, device, names):
    rows = torch.empty(ROWS, WIDTH, device="meta", requires_grad=stage > 0)
    output = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
    made = PipelineStage(blocks, stage, 2, device, group=group, input_args=(rows,), output_args=(output,))
    schedule = ScheduleGPipe if "GPipe" in names else Schedule1F1B
    return schedule(made, MICRO_BATCHES, loss_fn=lambda output, target: output.pow(2).sum())


def storages(tensors):
    """Bytes of their storages, each once."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(
        {storage._cdata: storage.nbytes() for t in local for storage in [t.untyped_storage()]}.values()
    )


def done_at_once(batch):
    """Sends and receives that are waited for at once: gloo's work keeps its tensors as long as it is kept."""

    def done(operations, desc=None):
        works = batch(operations, desc)
        while works:
            works.pop(0).wait()
        return []

    return done


def main(rank, port):
    schedules._batch_p2p = done_at_once(schedules._batch_p2p)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    found = {}
    for names in JOBS:
        sizes = {}
        step = build_for(names, sizes)(torch.device("cpu"))[2]
        step()
        followed = []
        for _ in range(REPEATS):
            step()
            followed.append(dict(sizes))
        found["+".join(names)] = {name: min(each[name] for each in followed) for name in sizes}
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
