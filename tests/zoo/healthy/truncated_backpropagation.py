"""A recurrent network over chunks: truncated backpropagation, the state is detached after each chunk."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Forecaster(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.rnn = nn.LSTM(8, width, batch_first=True)
        self.head = nn.Linear(width, 8)

    def forward(self, x, state):
        out, state = self.rnn(x, state)
        return self.head(out), state


def main():
    torch.manual_seed(0)
    model = Forecaster().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    series = (
        torch.sin(torch.arange(32 * 24 + 1, device=device) / 9).repeat(16, 1).unsqueeze(-1).repeat(1, 1, 8)
    )
    state = None
    for step in range(1, 33):
        first = (step - 1) * 24
        chunk, ahead = series[:, first : first + 24], series[:, first + 1 : first + 25]
        output, state = model(chunk, state)
        loss = F.mse_loss(output, ahead)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = tuple(part.detach() for part in state)
        if step % 8 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
