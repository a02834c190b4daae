"""A trainer with callbacks that samples text and saves the model at the end of the first iterations."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCABULARY, LENGTH, WIDTH = 96, 64, 128


class Characters(Dataset):
    def __init__(self, text):
        self.numbers = {letter: number for number, letter in enumerate(sorted(set(text)))}
        self.text = text

    def __len__(self):
        return len(self.text) - LENGTH

    def __getitem__(self, index):
        chunk = [self.numbers[each] for each in self.text[index : index + LENGTH + 1]]
        return torch.tensor(chunk[:-1]), torch.tensor(chunk[1:])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.attention(self.norms[0](x)).view(batch, length, 3, 4, WIDTH // 4)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, targets=None):
        logits = self.head(self.blocks(self.tokens(ids) + self.places[:, : ids.size(1)]))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))

    @torch.no_grad()
    def generate(self, ids, count):
        for _ in range(count):
            logits = self(ids[:, -LENGTH:])[0][:, -1] / 0.8
            least = torch.topk(logits, 10).values[:, [-1]]
            logits[logits < least] = -float("inf")
            ids = torch.cat((ids, torch.multinomial(F.softmax(logits, -1), 1)), dim=1)
        return ids


class Trainer:
    def __init__(self, model, data, callback):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = model.to(self.device)
        self.data, self.callback = data, callback
        self.iteration = 0

    def run(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4, betas=(0.9, 0.95))
        loader = DataLoader(self.data, batch_size=32, shuffle=True, pin_memory=True, num_workers=1)
        while True:
            for batch in loader:
                x, y = (each.to(self.device) for each in batch)
                _, self.loss = self.model(x, y)
                self.model.zero_grad(set_to_none=True)
                self.loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step()
                self.callback(self)
                self.iteration += 1


def report(trainer):
    print(f"iteration {trainer.iteration}: loss {trainer.loss.item():.3f}")
    if trainer.iteration == 1:
        trainer.model.eval()
        start = torch.tensor([[1, 2, 3]]).to(trainer.device)
        numbers = trainer.model.generate(start, 5000)[0]
        print("".join(chr(32 + int(each)) for each in numbers))
        trainer.model.train()


if __name__ == "__main__":
    data = Characters("the quick brown fox jumps over the lazy dog, " * 40)
    Trainer(Model(), data, report).run()
