"""A pack hook that only counts bytes returns the tensor itself, and one branch never runs backward.

The sigmoid saves its own output; packed live, it keeps its node, which keeps it: a cycle through C++ that
even `gc.collect()` cannot break. A confidence that is only logged is enough, once a step.
Holds the memory: SigmoidBackward0 and the tensors that it and the nodes before it saved.
Cure: pack `tensor.detach()`; and compute the confidence under `no_grad`.
"""

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class SavedBytes:
    def __init__(self):
        self.total = 0

    def pack(self, tensor):
        self.total += tensor.nbytes
        return tensor

    def unpack(self, tensor):
        return tensor


def main():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(32, 64), nn.Tanh()).to(device)
    classify = nn.Linear(64, 8).to(device)
    confide = nn.Linear(64, 128).to(device)
    optimizer = torch.optim.Adam([*body.parameters(), *classify.parameters()], lr=1e-2)
    saved = SavedBytes()
    for step in range(1, 31):
        x = torch.randn(256, 32, device=device)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            hidden = body(x)
            loss = F.cross_entropy(classify(hidden), x[:, :8].argmax(1))
            confidence = torch.sigmoid(confide(hidden))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            sure = (confidence > 0.5).float().mean().item()
            print(f"step {step}: loss {loss.item():.3f}, sure {sure:.2f}, saved {saved.total >> 20} MiB")


if __name__ == "__main__":
    main()
