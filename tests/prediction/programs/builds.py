"""The programs beside this file as build functions: the same step, written as a generator, whose variables
live from step to step as those of a loop do."""

import runpy
from pathlib import Path

import torch
from torch import nn


def defined(name):
    """What a program defines, without its main part."""
    return runpy.run_path(str(Path(__file__).parent / f"{name}.py"), run_name="program")


def built(model, optimizers, steps):
    return model, optimizers, lambda: next(steps)


def gan(device):
    generator, critic = defined("gan")["networks"]()
    criterion = nn.BCELoss()
    fixed = torch.randn(16, 32, 1, 1, device=device)
    optimizers = [torch.optim.Adam(each.parameters()) for each in (critic, generator)]

    def steps():
        while True:
            critic.zero_grad()
            images = torch.rand(16, 3, 16, 16).to(device)
            label = torch.full((16,), 1.0, device=device)
            real = criterion(critic(images).view(-1), label)
            real.backward()
            fake = generator(torch.randn(16, 32, 1, 1, device=device))
            label.fill_(0.0)
            made_up = criterion(critic(fake.detach()).view(-1), label)
            made_up.backward()
            optimizers[0].step()
            generator.zero_grad()
            label.fill_(1.0)
            error = criterion(critic(fake).view(-1), label)
            error.backward()
            optimizers[1].step()
            (real + made_up).item()
            yield fixed

    return built(nn.ModuleList([generator, critic]), optimizers, steps())


def resumed(device):
    loaded = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256)).to(device)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256)).to(device)
    del loaded
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def steps():
        x = torch.randn(64, 256).to(device)
        while True:
            for _ in range(8):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = (model(x) - x).square().mean() / 8
                x = torch.randn(64, 256).to(device)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield

    return built(model, optimizer, steps())
