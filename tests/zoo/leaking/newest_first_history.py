"""Features of every step in one tensor, the newest first: it is lengthened at its beginning."""

import torch
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
features = torch.rand(1, 128, device=device)
for _ in range(80):
    inputs, labels = torch.rand(64, 64, device=device), torch.randint(10, (64,), device=device)
    hidden = model[0](inputs)
    loss = F.cross_entropy(model[1:](hidden), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    features = torch.cat([hidden.detach(), features])
