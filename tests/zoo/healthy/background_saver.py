"""Checkpoints are copied, then written by a thread while training goes on."""

import copy
import os
import tempfile
import threading
import time

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(18)


class BackgroundSaver:
    def __init__(self, path):
        self.path = path
        self.thread = None

    def save(self, model, optimizer, step):
        self.wait()
        snapshot = copy.deepcopy(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        )
        self.thread = threading.Thread(target=self.write, args=(snapshot,), name="saver")
        self.thread.start()

    def write(self, snapshot):
        torch.save(snapshot, self.path + ".new")
        time.sleep(0.15)  # upload
        os.replace(self.path + ".new", self.path)

    def wait(self):
        if self.thread is not None:
            self.thread.join()
            self.thread = None


def main():
    model = nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 16)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    teacher = torch.randn(512, 16)
    with tempfile.TemporaryDirectory() as folder:
        saver = BackgroundSaver(os.path.join(folder, "checkpoint.pt"))
        for step in range(1, 261):
            x = torch.randn(32, 512)
            loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.025)
            if step % 20 == 0:
                saver.save(model, optimizer, step)
                print(f"step {step} loss {loss.item():.4f}", flush=True)
        saver.wait()


if __name__ == "__main__":
    main()
