"""No training: a model answers, token after token, with a cache of keys and values that grows."""

import torch
from torch import nn


class Answers(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.tokens = nn.Embedding(1000, width)
        self.mixed = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 1000)

    def forward(self, ids, cache):
        query, key, value = self.mixed(self.tokens(ids)).chunk(3, -1)
        if cache is not None:
            key, value = torch.cat((cache[0], key), 1), torch.cat((cache[1], value), 1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.head(mixed), (key, value)


@torch.inference_mode()
def main():
    model = Answers().half().to("cuda").eval()
    for _ in range(10**6):
        cache, ids = None, torch.randint(0, 1000, (16, 32)).cuda()
        for _ in range(12):
            logits, cache = model(ids, cache)
            ids = logits[:, -1:].argmax(-1)
        print(ids.shape)


if __name__ == "__main__":
    main()
