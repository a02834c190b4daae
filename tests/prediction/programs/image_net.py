"""DataParallel on integer devices, meters, a schedule, and a run that resumes from a checkpoint."""

import os
import sys
import time

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Meter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value, count=1):
        self.sum += value * count
        self.count += count

    def __str__(self):
        return f"{self.name} {self.sum / max(self.count, 1):.3f}"


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return torch.relu(self.body(x) + x)


def network():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1),
        Residual(32),
        Residual(32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def accuracy(output, target, most):
    with torch.no_grad():
        _, chosen = output.topk(most, 1, True, True)
        right = chosen.t().eq(target.view(1, -1).expand_as(chosen.t()))
        return right[:most].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0))


def main(folder):
    gpu = 0
    assert torch.cuda.device_count() >= 1
    torch.cuda.set_device(gpu)
    model = nn.DataParallel(network()).cuda()
    criterion = nn.CrossEntropyLoss().to(gpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    file = os.path.join(folder, "checkpoint.pth.tar")
    if os.path.isfile(file):
        checkpoint = torch.load(file, map_location=f"cuda:{gpu}")
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        print(f"resumed from epoch {checkpoint['epoch']}")
    data = TensorDataset(torch.randn(256, 3, 32, 32), torch.randint(0, 10, (256,)))
    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=2, pin_memory=True)
    for epoch in range(90):
        model.train()
        times, losses, top = Meter("time"), Meter("loss"), Meter("top5")
        end = time.time()
        for images, target in loader:
            images = images.cuda(gpu, non_blocking=True)
            target = target.cuda(gpu, non_blocking=True)
            output = model(images)
            loss = criterion(output, target)
            losses.update(loss.item(), images.size(0))
            top.update(accuracy(output, target, 5)[0].item(), images.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            times.update(time.time() - end)
            end = time.time()
        scheduler.step()
        print(epoch, times, losses, top)


if __name__ == "__main__":
    main(sys.argv[1])
