"""Adversarial training: discriminator and generator have an optimizer each and are updated in turns."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64)).to(device)
    critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)).to(device)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    ones, zeros = torch.ones(128, 1, device=device), torch.zeros(128, 1, device=device)
    for iteration in range(1, 31):
        real = torch.randn(128, 64, device=device) * 0.5 + 1
        fake = generator(torch.randn(128, 16, device=device))

        optimizer_d.zero_grad()
        loss_d = F.binary_cross_entropy_with_logits(critic(real), ones)
        loss_d = loss_d + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
        loss_d.backward()
        optimizer_d.step()

        if iteration % 2 == 0:
            optimizer_g.zero_grad()
            loss_g = F.binary_cross_entropy_with_logits(critic(fake), ones)
            loss_g.backward()
            optimizer_g.step()
        if iteration % 10 == 0:
            print(f"iteration {iteration}: critic {loss_d.item():.3f}, generator {loss_g.item():.3f}")


if __name__ == "__main__":
    main()
