"""Train a two-tower retrieval model; every 25 steps the validation queries are scored against all items."""

import time

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(10)
QUERIES, ITEMS, WIDTH = 768, 2000, 64


class Evaluator:
    def __init__(self, queries, answers):
        self.queries, self.answers = queries, answers
        self.scores = []
        self.recall = []

    @torch.no_grad()
    def run(self, tower, items):
        tower.eval()
        for chunk in self.queries.split(128):
            self.scores.append(tower(chunk) @ items.T)
        ranked = torch.cat(self.scores[-len(self.queries.split(128)) :]).topk(10).indices
        self.recall.append((ranked == self.answers[:, None]).any(1).float().mean().item())
        tower.train()
        return self.recall[-1]


def main():
    items = torch.randn(ITEMS, WIDTH)
    answers = torch.randint(0, ITEMS, (QUERIES,))
    mix = torch.randn(WIDTH, WIDTH) / 8
    evaluator = Evaluator(items[answers] @ mix + 0.1 * torch.randn(QUERIES, WIDTH), answers)
    tower = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, WIDTH))
    optimizer = torch.optim.AdamW(tower.parameters(), lr=2e-3)
    for step in range(1, 301):
        picked = torch.randint(0, ITEMS, (96,))
        query = items[picked] @ mix + 0.1 * torch.randn(96, WIDTH)
        loss = nn.functional.cross_entropy(tower(query) @ items[picked].T, torch.arange(96))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.03)
        if step % 25 == 0:
            print(
                f"step {step} loss {loss.item():.4f} recall@10 {evaluator.run(tower, items):.3f}", flush=True
            )


if __name__ == "__main__":
    main()
