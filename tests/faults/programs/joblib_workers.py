"""Models trained in joblib's worker processes and threads."""

import os

import joblib
import torch


def train(seed: int) -> float:
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.ones(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    for backend in ("loky", "threading"):
        losses = joblib.Parallel(n_jobs=2, backend=backend)(joblib.delayed(train)(seed) for seed in range(4))
        print(backend, len(losses), [round(loss, 4) for loss in losses] if backend == "loky" else "")
    print(sorted(os.listdir(".")))
