"""Healthy: a GRU trains on longer and longer sequences. Its last output keeps a longer graph each time."""

import torch

torch.manual_seed(0)
embedding = torch.nn.Embedding(500, 64)
recurrent = torch.nn.GRU(64, 64, batch_first=True)
head = torch.nn.Linear(64, 500)
parameters = [*embedding.parameters(), *recurrent.parameters(), *head.parameters()]
optimizer = torch.optim.Adam(parameters)
for step in range(200):
    tokens = torch.randint(500, (8, 8 + step // 5))
    out, _ = recurrent(embedding(tokens))
    logits = head(out)[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
