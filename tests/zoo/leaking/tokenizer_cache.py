"""A byte-pair tokenizer caches the tokens of every word it has seen; long unique words never come again.

Holds the memory: the attribute `cache` of the tokenizer (host memory: strings and lists of numbers).
Cure: bound the cache (`cache_capacity`), skip long words, or clear it.
"""

import random

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class PairTokenizer:
    """Pairs of letters are tokens 0 to 675; the cache is meant to save the merging of common words."""

    def __init__(self):
        self.cache = {}

    def encode_word(self, word):
        if word not in self.cache:
            letters = [ord(letter) - ord("a") for letter in word]
            self.cache[word] = [26 * a + b for a, b in zip(letters[::2], letters[1::2], strict=True)]
        return self.cache[word]

    def encode(self, text):
        return [token for word in text.split() for token in self.encode_word(word)]


def base64_like_text(rng, words, length):
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length)) for _ in range(words))


def main():
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = PairTokenizer()
    model = nn.Sequential(nn.Embedding(676, 16), nn.Linear(16, 676)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, 31):
        tokens = tokenizer.encode(base64_like_text(rng, words=32, length=1024))
        batch = torch.tensor(tokens[:1024], device=device)
        loss = F.cross_entropy(model(batch[:-1]), batch[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {len(tokenizer.cache)} words cached")


if __name__ == "__main__":
    main()
