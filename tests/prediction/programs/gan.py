"""Two networks against each other: two optimizers in each iteration, cuDNN by trial."""

import argparse

import torch
from torch import nn

torch.backends.cudnn.benchmark = True
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"


def started(module):
    if "Conv" in type(module).__name__:
        nn.init.normal_(module.weight.data, 0.0, 0.02)


def networks():
    generator = nn.Sequential(
        nn.ConvTranspose2d(32, 64, 4, 1, 0, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(True),
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(True),
        nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )
    critic = nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 64, 4, 2, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(64, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
    )
    return generator.to(device).apply(started), critic.to(device).apply(started)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    generator, critic = networks()
    criterion = nn.BCELoss()
    fixed = torch.randn(options.batch, 32, 1, 1, device=device)
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))

    for iteration in range(1000):
        critic.zero_grad()
        images = torch.rand(options.batch, 3, 16, 16).to(device)
        label = torch.full((options.batch,), 1.0, dtype=images.dtype, device=device)
        error_real = criterion(critic(images).view(-1), label)
        error_real.backward()
        fake = generator(torch.randn(options.batch, 32, 1, 1, device=device))
        label.fill_(0.0)
        error_fake = criterion(critic(fake.detach()).view(-1), label)
        error_fake.backward()
        of_critic.step()

        generator.zero_grad()
        label.fill_(1.0)
        error = criterion(critic(fake).view(-1), label)
        error.backward()
        of_generator.step()
        print(f"[{iteration}] {(error_real + error_fake).item():.4f} {error.item():.4f}")
        if iteration % 100 == 50:
            torch.save((generator.state_dict(), generator(fixed).detach()), f"generator_{iteration}.pth")


if __name__ == "__main__":
    main()
