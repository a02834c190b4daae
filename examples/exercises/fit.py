"""Exercise 3: a training step that does not fit a small GPU. How much does it need, and what makes it fit?"""

import torch
from torch import nn

WIDTH, LAYERS, VOCABULARY = 512, 8, 16_000


def build(device, micro_batch=16, seq_len=512):
    block = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
    with torch.device(device):
        model = nn.ModuleDict(
            {
                "embedding": nn.Embedding(VOCABULARY, WIDTH),
                "blocks": nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False),
                "head": nn.Linear(WIDTH, VOCABULARY),
            }
        ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        ids = torch.randint(0, VOCABULARY, (micro_batch, seq_len), device=device)
        logits = model["head"](model["blocks"](model["embedding"](ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
