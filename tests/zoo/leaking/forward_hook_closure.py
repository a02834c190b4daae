"""A forward hook appends the output of a layer to a dict that lives in the hook's closure only.

Holds the memory: closure of the hook `grab`: `captured["n1"]`.
Cure: detach and reduce in the hook, keep only the last output, or remove the hook when done.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1 = nn.Linear(32, 128)
        self.n2 = nn.Linear(128, 10)

    def forward(self, x):
        return self.n2(torch.relu(self.n1(x)))


def watch_layers(model, names):
    captured = {name: [] for name in names}

    def make_hook(name):
        def grab(module, inputs, output):
            captured[name].append(output)

        return grab

    for name in names:
        getattr(model, name).register_forward_hook(make_hook(name))


torch.manual_seed(0)
model = Net().to(device)
watch_layers(model, ["n1"])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(1, 31):
    x = torch.randn(256, 32, device=device)
    loss = F.cross_entropy(model(x), x[:, :10].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
