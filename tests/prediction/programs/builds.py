"""The programs beside this file as build functions: the same step, written as a generator, whose variables
live from step to step as those of a loop do."""

import runpy
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


def defined(name):
    """What a program defines, without its main part."""
    return runpy.run_path(str(Path(__file__).parent / f"{name}.py"), run_name="program")


def built(model, optimizers, steps):
    return model, optimizers, lambda: next(steps)


def mini_gpt(device):
    model = defined("mini_gpt")["Model"]().to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def steps():
        loss = None
        while True:
            x, y = (torch.randint(0, 27, (32, 64)).to(device) for _ in range(2))
            _, loss = model(x, y)
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            yield

    return built(model, optimizer, steps())


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


def language_model(device):
    model = defined("language_model")["Recurrent"]().to(device)
    text = torch.randint(0, 200, (3000, 20)).to(device)
    criterion = nn.NLLLoss()

    def steps():
        hidden = torch.zeros(2, 20, 64, device=device)
        start = 0
        while True:
            ids, targets = text[start : start + 15], text[start + 1 : start + 16].view(-1)
            start += 15
            model.zero_grad()
            hidden = hidden.detach()
            output, hidden = model(ids, hidden)
            loss = criterion(output, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-20.0)
            yield

    return built(model, torch.optim.SGD(model.parameters()), steps())


def image_net(device):
    model = defined("image_net")["network"]().to(device)
    accuracy = defined("image_net")["accuracy"]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)

    def steps():
        while True:
            images, target = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))  # drops the last ones
            images = images.to(device)
            target = target.to(device)
            output = model(images)
            loss = F.cross_entropy(output, target)
            accuracy(output, target, 5)[0].item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield

    return built(model, optimizer, steps())


def digits(device):
    model = defined("digits")["Net"]().to(device)
    optimizer = torch.optim.Adadelta(model.parameters())

    def steps():
        while True:
            data, target = torch.randn(32, 1, 28, 28).to(device), torch.randint(0, 10, (32,)).to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            yield

    return built(model, optimizer, steps())


def vision_amp(device):
    program = defined("vision_amp")
    model = nn.Sequential(
        nn.Conv2d(3, 48, 4, 4),
        nn.Flatten(2),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(48 * 64, 100),
    ).to(device)
    average = program["Average"](model, 0.999)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def steps():
        while True:
            x, target = torch.randn(32, 3, 32, 32).to(device), torch.randint(0, 100, (32,)).to(device)
            with torch.autocast("cuda", torch.float16):
                loss = criterion(model(x), target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            average.update(model)
            yield

    return built(model, optimizer, steps())


def hub_trainer(device):
    model = defined("hub_trainer")["Classifier"]().to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def steps():
        total = torch.tensor(0.0, device=device)
        while True:
            batches = [(torch.randint(0, 500, (8, 32)), torch.randint(0, 3, (8,))) for _ in range(4)]
            for batch in [[each.to(device) for each in batch] for batch in batches]:
                loss = model(*batch)["loss"] / 4
                loss.backward()
                total += loss.detach()
                del loss
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.zero_grad()
            yield

    return built(model, optimizer, steps())


def policy_gradient(device):
    program = defined("policy_gradient")
    policy = program["Policy"]().to(device)
    optimizer = torch.optim.Adam(policy.parameters())

    def steps():
        while True:
            world, state = program["World"](0), torch.zeros(4)
            for _ in range(60):
                state, reward = world.act(program["choose"](policy, state))
                policy.rewards.append(reward)
            program["finish"](policy, optimizer)
            yield

    return built(policy, optimizer, steps())


def auto_encoder(device):
    program = defined("auto_encoder")
    model = program["Coder"]().to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def steps():
        while True:
            data = torch.rand(128, 1, 28, 28).to(device)
            optimizer.zero_grad()
            made, mean, variance = model(data)
            loss = program["loss_of"](made, data, mean, variance)
            del made, mean, variance
            loss.backward()
            optimizer.step()
            yield

    return built(model, optimizer, steps())


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


def closures(device):
    program = defined("closures")
    model = program["Sequence"]().to(device)
    waves = program["waves"]
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(waves), waves.roll(1, 1))
        loss.backward()
        return loss

    def step():
        optimizer.step(closure)
        with torch.no_grad():
            F.mse_loss(model(waves), waves)

    return model, optimizer, step


def chat(device):
    program = defined("chat")
    model = program["Chat"]().to(device)
    others = [*model.embedding.parameters(), *model.head.parameters()]
    optimizers = [
        torch.optim.AdamW(others, fused=True),
        program["Orthogonal"](list(model.layers.parameters())),
    ]

    def steps():
        while True:
            for _ in range(2):
                ids = torch.randint(0, 512, (8, 65), device=device)
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(ids[:, :-1], ids[:, 1:])
                (loss / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
            yield

    return built(model, optimizers, steps())


def answers(device):
    model = defined("answers")["Answers"]().half().to(device).eval()

    @torch.inference_mode()
    def answered():
        """As in the script, the last answers are alive when the next ones begin."""
        while True:
            cache, ids = None, torch.randint(0, 1000, (16, 32)).cuda()
            for _ in range(12):
                logits, cache = model(ids, cache)
                ids = logits[:, -1:].argmax(-1)
            yield

    steps = answered()
    return model, torch.optim.SGD(model.parameters()), lambda: next(steps)
