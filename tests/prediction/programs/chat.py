"""Matrices are trained by momentum made orthogonal, all else by AdamW; devices are integers."""

import os

import torch
from torch import nn


class Orthogonal(torch.optim.Optimizer):
    def __init__(self, parameters, rate=0.02, momentum=0.95):
        super().__init__(parameters, {"rate": rate, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(parameter.grad)
                buffer = state["buffer"]
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                x = parameter.grad.lerp_(buffer, group["momentum"]).bfloat16()
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    product = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
                parameter.add_(x.type_as(parameter), alpha=-group["rate"])


class Chat(nn.Module):
    def __init__(self, vocabulary=512, width=128):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, targets):
        x = nn.functional.rms_norm(self.embedding(ids), (128,))
        for layer in self.layers:
            x = x + nn.functional.relu(layer(nn.functional.rms_norm(x, (128,)))).square()
        logits = 15 * torch.tanh(self.head(x).float() / 15)
        return nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def main():
    local = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local)
    torch.cuda.manual_seed(42)
    with torch.device("meta"):
        model = Chat()
    model.to_empty(device=local)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    matrices = list(model.layers.parameters())
    others = [*model.embedding.parameters(), *model.head.parameters()]
    optimizers = [torch.optim.AdamW(others, fused=True), Orthogonal(matrices)]
    for step in range(1000):
        for _ in range(2):
            ids = torch.randint(0, 512, (8, 65), device=local)
            with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
                loss = model(ids[:, :-1], ids[:, 1:])
            (loss / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)


if __name__ == "__main__":
    main()
