"""After each batch the class probabilities are converted to float64 numpy arrays and kept on the trainer.

Holds the memory: `trainer.val_results`, a list of numpy arrays (host memory, no tensor).
Cure: clear the list at each epoch's end, or keep the argmax instead of all probabilities.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        self.val_results = []

    def train_batch(self, x, labels):
        loss = F.cross_entropy(self.model(x), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def validate(self, x, labels):
        probabilities = self.model(x).softmax(-1).cpu().numpy().astype(np.float64)
        self.val_results.append(probabilities)
        return (probabilities.argmax(1) == labels.cpu().numpy()).mean()


def main():
    torch.manual_seed(0)
    trainer = Trainer(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).to(device))
    for step in range(1, 31):
        x = torch.randn(512, 32, device=device)
        loss = trainer.train_batch(x, x.argmax(1))
        held_out = torch.randn(512, 32, device=device)
        accuracy = trainer.validate(held_out, held_out.argmax(1))
        if step % 10 == 0:
            print(f"step {step}: loss {loss:.3f}, accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
