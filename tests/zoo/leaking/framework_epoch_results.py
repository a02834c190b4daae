"""`self.log("seen", 1, on_epoch=True)`: the framework keeps the whole batch output for the epoch's average.

A stand-in of a training framework. The module logs a constant, and the loop stores the step's output with it.
Holds the memory: the loop's `epoch_results`, key "batch_output".
Cure: store what was logged (a number) and not the output of `training_step`.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Loop:
    def __init__(self, module, max_steps):
        self.module, self.max_steps = module, max_steps
        self.epoch_results = []

    def run(self):
        optimizer = self.module.configure_optimizer()
        for step in range(1, self.max_steps + 1):
            output = self.module.training_step(self.module.batch())
            optimizer.zero_grad()
            output["loss"].backward()
            optimizer.step()
            for name, value in self.module.logged.items():
                self.epoch_results.append({"name": name, "value": value, "batch_output": output})
            if step % 10 == 0:
                print(f"step {step}: loss {output['loss'].item():.3f}")
        print(f"seen: {sum(result['value'] for result in self.epoch_results)}")


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.logged = {}

    def log(self, name, value, on_epoch):
        if on_epoch:
            self.logged[name] = value

    def configure_optimizer(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def batch(self):
        return torch.randn(1024, 32, device=device)

    def training_step(self, batch):
        logits = self.net(batch)
        self.log("seen", 1, on_epoch=True)
        return {"loss": F.cross_entropy(logits, batch.argmax(1)), "logits": logits.detach()}


if __name__ == "__main__":
    torch.manual_seed(0)
    Loop(Module().to(device), max_steps=30).run()
