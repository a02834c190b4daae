"""Evaluations run in a thread pool; the futures are kept, and every future keeps its result.

Holds the memory: the local list `evaluations` of `main` -> Future -> `_result`.
Cure: take the number out of the future (`future.result().mean().item()`) and drop the future.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


@torch.no_grad()
def evaluate(weight, bias, samples):
    return (samples @ weight.t() + bias).softmax(-1)


def main():
    torch.manual_seed(0)
    model = nn.Linear(32, 64).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    samples = torch.randn(640, 32, device=device)
    evaluations = []
    with ThreadPoolExecutor(max_workers=1) as pool:
        for step in range(1, 31):
            x = torch.randn(64, 32, device=device)
            loss = F.cross_entropy(model(x), x.argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            evaluations.append(pool.submit(evaluate, model.weight, model.bias, samples))
            confident = evaluations[-1].result().amax(1).mean().item()
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.3f}, confidence {confident:.3f}")


if __name__ == "__main__":
    main()
