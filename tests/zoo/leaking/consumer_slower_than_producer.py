"""A queue of crops that is read more slowly than it is filled: its entries move on, and it gets longer."""

import queue

import torch
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torch.nn.Linear(64, 10).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
crops = queue.Queue()
for _ in range(120):
    inputs, labels = torch.rand(32, 64, device=device), torch.randint(10, (32,), device=device)
    loss = F.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for _ in range(3):
        crops.put(torch.rand(128, 128, device=device))
    for _ in range(2):
        crops.get()
