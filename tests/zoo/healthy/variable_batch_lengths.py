"""Each batch is as long as its longest text, so memory goes up and down at random."""

import random

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 100


class LanguageModel(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def main():
    torch.manual_seed(0)
    rng = random.Random(7)
    model = LanguageModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, 37):
        longest = max(rng.randint(8, 96) for _ in range(3))
        start = torch.randint(VOCABULARY, (16, 1), device=device)
        tokens = (start + torch.arange(longest + 1, device=device)) % VOCABULARY
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 12 == 0:
            print(f"step {step}: length {longest}, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
