"""L-BFGS: the optimizer runs forward and backward itself, several times in each step."""

import torch
from torch import nn, optim

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
times = torch.arange(0, 200, dtype=torch.float32).repeat(20, 1)
waves = torch.sin(times / 20).to(device)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(200, 256)
        self.second = nn.Linear(256, 200)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def main():
    model = Sequence().to(device)
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)
    for _ in range(15):

        def closure():
            optimizer.zero_grad()
            loss = criterion(model(waves), waves.roll(1, 1))
            print("loss:", loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            print(criterion(model(waves), waves).item())


if __name__ == "__main__":
    main()
