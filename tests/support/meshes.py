"""A small transformer's layers on meshes of two dimensions, and the bytes of a rank's tensors in one step.

As a script it is one of the ranks: `meshes.py RANK PORT` prints its bytes on each mesh, over gloo on the CPU.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 4
WIDTH = 128
ROWS = 48
MICRO_BATCHES = 4
MESHES = [("shard", "tensor"), ("pipeline", "shard"), ("pipeline", "tensor"), ("replicate", "shard")]


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


def build_for(names, sizes):
    """Return a build function for such a mesh; its steps write what they keep and save into `sizes`."""

    def build(device):
        mesh = init_device_mesh(torch.device(device).type, (2, RANKS // 2), mesh_dim_names=names)
        stage = mesh["pipeline"].get_local_rank() if "pipeline" in names else None
        blocks = nn.Sequential(*[Block() for _ in range(3 - (stage or 0))]).to(device)  # stages differ
        if "tensor" in names:
            split(blocks, mesh["tensor"])
        if "shard" in names:
            sharded(blocks, mesh if "replicate" in names else mesh["shard"])
        # One by one: of blocks that are split by tensor alone, the norms are plain tensors.
        optimizer = torch.optim.AdamW(blocks.parameters(), foreach=False)
        schedule = None if stage is None else scheduled(blocks, stage, mesh["pipeline"].get_group(), device)

        def step():
            batch = torch.ones(MICRO_BATCHES * ROWS, WIDTH, device=device)
            kept, largest = [], {}

            def note(tensor):
                storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
                kept.append(storage)  # no other one gets its number
                largest[storage._cdata] = max(largest.get(storage._cdata, 0), storage.nbytes())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                if schedule is None:
                    blocks(batch).pow(2).sum().backward()
                elif stage == 0:
                    schedule.step(batch)
                else:
                    schedule.step(target=batch)
            optimizer.step()
            sizes["saved"] = sum(largest.values())
            sizes["parameters"] = storages(blocks.parameters())
            sizes["gradients"] = storages(parameter.grad for parameter in blocks.parameters())
            states = (state for held in optimizer.state.values() for state in held.values())
            sizes["states"] = storages(state for state in states if state.dim())
            optimizer.zero_grad()

        return blocks, optimizer, step

    return build


def scheduled(blocks, stage, group, device):
    rows = torch.empty(ROWS, WIDTH, device="meta", requires_grad=stage > 0)
    output = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
    made = PipelineStage(blocks, stage, 2, device, group=group, input_args=(rows,), output_args=(output,))
    return Schedule1F1B(made, MICRO_BATCHES, loss_fn=lambda output, target: output.pow(2).sum())


def storages(tensors):
    """Bytes of their storages, each once."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(
        {storage._cdata: storage.nbytes() for t in local for storage in [t.untyped_storage()]}.values()
    )


def main(rank, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    found = {}
    for names in MESHES:
        sizes = {}
        step = build_for(names, sizes)(torch.device("cpu"))[2]
        step()
        step()
        found["+".join(names)] = sizes
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
