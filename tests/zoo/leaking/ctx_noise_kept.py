"""A sampling op keeps its white noise on `ctx.white`; the negative ELBO of every step is kept for a plot.

Holds the memory: the attribute `elbos` of the run -> ... -> ReparameterisedSampleBackward -> ctx.white.
Cure: `ctx.save_for_backward(white)`; and keep `elbo.item()`.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class ReparameterisedSample(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mean, log_std):
        white = torch.randn_like(mean)
        ctx.white = white
        ctx.save_for_backward(log_std)
        return mean + log_std.exp() * white

    @staticmethod
    def backward(ctx, grad):
        (log_std,) = ctx.saved_tensors
        return grad, grad * log_std.exp() * ctx.white


class VariationalRun:
    def __init__(self, observed=32, latent=64):
        self.encoder = nn.Linear(observed, 2 * latent).to(device)
        self.decoder = nn.Linear(latent, observed).to(device)
        parameters = [*self.encoder.parameters(), *self.decoder.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-3)
        self.elbos = []

    def step(self, batch):
        mean, log_std = self.encoder(batch).chunk(2, dim=1)
        latent = ReparameterisedSample.apply(mean, log_std)
        divergence = 0.5 * (mean.square() + (2 * log_std).exp() - 2 * log_std - 1).sum(1).mean()
        elbo = F.mse_loss(self.decoder(latent), batch, reduction="sum") / len(batch) + divergence
        self.optimizer.zero_grad()
        elbo.backward()
        self.optimizer.step()
        self.elbos.append(elbo)


def main():
    torch.manual_seed(0)
    run = VariationalRun()
    for step in range(1, 31):
        run.step(torch.randn(1024, 32, device=device))
        if step % 10 == 0:
            print(f"step {step}: negative ELBO {run.elbos[-1].item():.2f}")


if __name__ == "__main__":
    main()
