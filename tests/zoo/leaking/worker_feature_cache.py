"""Keyword spotting on random crops of long recordings. Features are computed by the loader's workers."""

import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
torch.manual_seed(0)
CROP, HOP, WINDOW = 16384, 128, 256


class Recordings(Dataset):
    def __init__(self, files, crops):
        rng = np.random.default_rng(0)
        self.waves = rng.standard_normal((files, 160_000), dtype=np.float32)
        self.files, self.crops = files, crops
        self.features = {}
        self.window = np.hanning(WINDOW).astype(np.float32)

    def __len__(self):
        return self.files * self.crops

    def spectrogram(self, file, start):
        key = (file, start)
        if key not in self.features:
            time.sleep(0.003)  # the disk
            frames = np.lib.stride_tricks.sliding_window_view(self.waves[file, start : start + CROP], WINDOW)[
                ::HOP
            ]
            self.features[key] = np.abs(np.fft.rfft(frames * self.window)).astype(np.float32)
        return self.features[key]

    def __getitem__(self, index):
        file = index % self.files
        start = int(torch.randint(0, self.waves.shape[1] - CROP, ()))
        return self.spectrogram(file, start), file % 10


def main():
    data = Recordings(files=24, crops=54)
    loader = DataLoader(
        data, batch_size=16, shuffle=True, num_workers=2, persistent_workers=True, drop_last=True
    )
    model = nn.Sequential(
        nn.Conv1d(129, 32, 9, stride=4), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    for epoch in range(4):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.transpose(1, 2)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            time.sleep(0.02)
            if step % 20 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
