"""An attribution tool registers a recorder as a forward pre-hook; it stores the inputs of every call.

Holds the memory: the attribute `stored` of the recorder, reached from the module's hooks as well.
Cure: store the last input only (or a weak reference), and clear it when the hook is removed.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class InputRecorder:
    def __init__(self):
        self.stored = []

    def __call__(self, module, inputs):
        self.stored.append(inputs)

    def relevance(self, layer):
        (last,) = self.stored[-1]
        return (last.detach().mean(0) * layer.weight.detach().sum(0)).abs()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 4)).to(device)
    recorder = InputRecorder()
    model[2].register_forward_pre_hook(recorder)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1, 31):
        x = torch.randn(512, 32, device=device)
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            best = recorder.relevance(model[2]).argmax().item()
            print(f"step {step}: loss {loss.item():.3f}, most relevant unit {best}")


if __name__ == "__main__":
    main()
