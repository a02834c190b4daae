"""Data-parallel language model: two processes on this machine, gloo."""

import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCAB, LENGTH, BATCH, STEPS = 512, 128, 8, 220


class TinyLM(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def train(rank, world, rendezvous):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    model = DistributedDataParallel(TinyLM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1))
        log_probs = model(tokens[:, :-1]).log_softmax(-1)
        loss = -log_probs.gather(-1, tokens[:, 1:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            losses.append({"step": step, "loss": loss.item(), "per_token": log_probs[..., 0]})
            if step % 20 == 0:
                recent = sum(entry["loss"] for entry in losses[-20:]) / 20
                print(f"step {step} loss {recent:.4f}", flush=True)
        time.sleep(0.02)
    dist.barrier()
    dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(2, os.path.join(folder, "rendezvous")), nprocs=2)


if __name__ == "__main__":
    main()
