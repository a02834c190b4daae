"""A class-activation map keeps the gradient of its target layer in a backward hook, at every step.

Holds the memory: the attribute `gradients` of the `GradCam` object, a list that nobody empties.
Cure: keep only the last one, detached; empty the list after each map; remove the hook when it is not needed.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class GradCam:
    def __init__(self, layer):
        self.gradients = []
        self.handle = layer.register_full_backward_hook(self.save_gradient)

    def save_gradient(self, module, grad_input, grad_output):
        self.gradients.append(grad_output[0])

    def importance(self):
        return self.gradients[-1].abs().mean(0)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cam = GradCam(model[0])
    for step in range(1, 31):
        x = torch.randn(256, 64, device=device)
        loss = F.cross_entropy(model(x), x[:, :16].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, top channel {cam.importance().argmax().item()}")


if __name__ == "__main__":
    main()
