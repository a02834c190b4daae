"""A history of plain numbers: loss, learning rate and gradient norm, a few hundred bytes per step."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class History:
    def __init__(self):
        self.rows = []

    def add(self, **values):
        self.rows.append(values)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = History()
    for step in range(1, 41):
        x = torch.rand(256, 64, device=device)
        loss = F.mse_loss(model(x), x.square())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        optimizer.step()
        history.add(step=step, loss=loss.item(), norm=norm.item(), lr=optimizer.param_groups[0]["lr"])
        if step % 10 == 0:
            print(history.rows[-1])


if __name__ == "__main__":
    main()
