"""A variational auto-encoder that draws samples after each epoch."""

import torch
from torch import nn, optim
from torch.nn import functional as F

device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 200)
        self.mean = nn.Linear(200, 20)
        self.variance = nn.Linear(200, 20)
        self.fc3 = nn.Linear(20, 200)
        self.fc4 = nn.Linear(200, 784)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        hidden = F.relu(self.fc1(x.view(-1, 784)))
        mean, variance = self.mean(hidden), self.variance(hidden)
        spread = torch.exp(0.5 * variance)
        return self.decode(mean + torch.randn_like(spread) * spread), mean, variance


def loss_of(made, x, mean, variance):
    distance = F.binary_cross_entropy(made, x.view(-1, 784), reduction="sum")
    return distance - 0.5 * torch.sum(1 + variance - mean.pow(2) - variance.exp())


def main():
    model = Coder().to(device)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(10):
        model.train()
        total = 0
        for _ in range(50):
            data = torch.rand(128, 1, 28, 28).to(device)
            optimizer.zero_grad()
            loss = loss_of(*(lambda made: (made[0], data, *made[1:]))(model(data)))
            loss.backward()
            total += loss.item()
            optimizer.step()
        with torch.no_grad():
            sample = model.decode(torch.randn(64, 20).to(device)).cpu()
        print(epoch, total, sample.shape)


if __name__ == "__main__":
    main()
