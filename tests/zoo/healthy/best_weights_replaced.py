"""Whenever the held-out loss improves, a copy of the weights replaces the one kept before."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.waited = patience, 0
        self.best_loss, self.best_weights = float("inf"), None

    def update(self, loss, model):
        if loss < self.best_loss:
            self.best_loss, self.waited = loss, 0
            self.best_weights = copy.deepcopy(model.state_dict())
        else:
            self.waited += 1
        return self.waited >= self.patience


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    held_out = torch.rand(256, 64, device=device)
    stopping = EarlyStopping(patience=40)
    for step in range(1, 37):
        x = torch.rand(128, 64, device=device)
        loss = F.mse_loss(model(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            held_out_loss = F.mse_loss(model(held_out), held_out.flip(1)).item()
        if stopping.update(held_out_loss, model):
            break
        if step % 12 == 0:
            print(f"step {step}: loss {loss.item():.4f}, best held-out {stopping.best_loss:.4f}")
    model.load_state_dict(stopping.best_weights)


if __name__ == "__main__":
    main()
