"""A trainer keeps the metrics of every step, the network's output among them.

Holds the memory: the attribute `history` of the trainer (a list of dicts, key "output").
Cure: keep numbers (`.item()`), or reduce and detach the output before it is stored; clear it each epoch.
"""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.history = []

    def fit(self, steps):
        for step in range(1, steps + 1):
            state = torch.rand(512, 8, device=device)
            wanted = torch.sin(3 * state).repeat(1, 8)
            metrics = self.train_step(state, wanted)
            self.history.append(metrics)
            if step % 10 == 0:
                print(f"step {step}: loss {metrics['loss']:.4f}")

    def train_step(self, state, wanted):
        output = self.model(state)
        loss = (output - wanted).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item(), "output": output}


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64)).to(device)
    trainer = Trainer(model, lr=1e-2)
    trainer.fit(30)


if __name__ == "__main__":
    main()
