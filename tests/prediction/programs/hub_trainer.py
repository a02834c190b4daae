"""A library's trainer: arguments, gradient accumulation, a schedule, checkpoints now and then."""

import math
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


@dataclass
class Arguments:
    output_dir: str = "out"
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 4
    max_steps: int = 100
    save_steps: int = 50
    device: torch.device = field(default_factory=lambda: torch.device("cuda:0"))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(500, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.score = nn.Linear(64, 3)

    def forward(self, input_ids, labels=None):
        logits = self.score(self.encoder(self.tokens(input_ids))[:, 0])
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Trainer:
    def __init__(self, model, args):
        self.model, self.args = model.to(args.device), args
        decayed = [each for each in model.parameters() if each.dim() > 1]
        others = [each for each in model.parameters() if each.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=5e-5)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / 100)))

    def batch(self):
        shape = (self.args.per_device_train_batch_size, 32)
        inputs = {"input_ids": torch.randint(0, 500, shape), "labels": torch.randint(0, 3, shape[:1])}
        return {name: each.to(self.args.device) for name, each in inputs.items()}

    def training_step(self, inputs):
        self.model.train()
        loss = self.model(**inputs)["loss"] / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()

    def train(self):
        total = torch.tensor(0.0, device=self.args.device)
        self.model.zero_grad()
        for step in range(self.args.max_steps):
            for inputs in [self.batch() for _ in range(self.args.gradient_accumulation_steps)]:
                total += self.training_step(inputs)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.model.zero_grad()
            if step % self.args.save_steps == self.args.save_steps - 1:
                torch.save(self.model.state_dict(), f"{self.args.output_dir}/checkpoint-{step}.bin")
        print({"train_loss": total.item() / self.args.max_steps})


if __name__ == "__main__":
    Trainer(Classifier(), Arguments()).train()
