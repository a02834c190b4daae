"""A pipeline engine appends what its last stage returns to a store, model output and graph included.

Holds the memory: the attribute `forward_data_store` of the engine, key "model_output".
Cure: detach `model_output` (or return it to the caller only), and clear the store after each step.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class PipelineEngine:
    def __init__(self, stages, lr, is_last_stage=True):
        self.stages = stages
        self.is_last_stage = is_last_stage
        self.optimizer = torch.optim.AdamW(stages.parameters(), lr=lr)
        self.forward_data_store = []

    def forward_step(self, batch):
        output = self.stages[1](self.stages[0](batch["input"]))
        loss = F.cross_entropy(output, batch["labels"])
        if self.is_last_stage:
            self.forward_data_store.append({"loss_reduced": loss.item(), "model_output": output})
        return loss

    def train_batch(self, micro_batches):
        self.optimizer.zero_grad()
        for batch in micro_batches:
            (self.forward_step(batch) / len(micro_batches)).backward()
        self.optimizer.step()
        recent = self.forward_data_store[-len(micro_batches) :]
        return sum(data["loss_reduced"] for data in recent) / len(recent)


def main():
    torch.manual_seed(0)
    stages = nn.ModuleList([nn.Sequential(nn.Linear(64, 32), nn.GELU()), nn.Linear(32, 64)]).to(device)
    engine = PipelineEngine(stages, lr=1e-2)
    for step in range(1, 25):
        inputs = [torch.randn(320, 64, device=device) for _ in range(2)]
        loss = engine.train_batch([{"input": x, "labels": x.argmax(1)} for x in inputs])
        if step % 8 == 0:
            print(f"step {step}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
