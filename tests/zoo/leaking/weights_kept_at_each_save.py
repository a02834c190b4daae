"""Regression with checkpoints every 20 steps; the best one is restored at the end."""

import os
import tempfile
import time

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(9)


class CheckpointKeeper:
    def __init__(self, folder):
        self.path = os.path.join(folder, "last.pt")
        self.history = []

    def save(self, model, optimizer, step, score):
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        torch.save({"model": state, "optimizer": optimizer.state_dict(), "step": step}, self.path)
        self.history.append({"step": step, "score": score, "state": state})

    def best(self):
        return min(self.history, key=lambda entry: entry["score"])


def batch(weight):
    x = torch.randn(64, 256)
    time.sleep(0.025)
    return x, (x @ weight).sin()


def main():
    weight = torch.randn(256, 1) / 16
    model = nn.Sequential(
        nn.Linear(256, 1536), nn.GELU(), nn.Linear(1536, 1024), nn.GELU(), nn.Linear(1024, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    with tempfile.TemporaryDirectory() as folder:
        keeper = CheckpointKeeper(folder)
        running = 0.0
        for step in range(1, 281):
            x, y = batch(weight)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running = loss.item() if step == 1 else 0.95 * running + 0.05 * loss.item()
            if step % 20 == 0:
                keeper.save(model, optimizer, step, running)
                print(f"step {step} loss {running:.4f} saved {len(keeper.history)}", flush=True)
        model.load_state_dict(keeper.best()["state"])
        print(f"restored step {keeper.best()['step']}", flush=True)


if __name__ == "__main__":
    main()
