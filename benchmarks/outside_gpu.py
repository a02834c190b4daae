"""A GPT-2 with a leak, started plainly on a GPU: what the census from outside and `attach` say of it.

python benchmarks/outside_gpu.py [SECONDS]
"""

from __future__ import annotations

import subprocess
import sys

_JOB = """
import sys, time, torch
from torch import nn
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    def forward(self, x):
        n, t, w = x.shape
        q, k, v = self.qkv(self.first(x)).view(n, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, w))
        return x + self.mlp(self.second(x))
class GPT2(nn.Module):
    def __init__(self, width=768, layers=12, heads=12, words=50257, length=256):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))
model = GPT2().cuda()
optimizer = torch.optim.AdamW(model.parameters())
history, step = [], 0
while True:
    tokens = torch.randint(50257, (2, 256), device="cuda")
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.view(-1, 50257), tokens.view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(logits.detach()[:, ::8].clone())  # the leak: 12.9 MB per step
    step += 1
    if step == 5:
        print("ready", flush=True)
    if step > 5:
        time.sleep(0.1)
    torch.cuda.synchronize()
    print(step, len(history), torch.cuda.memory_allocated(), file=sys.stderr, flush=True)
"""


def main() -> None:
    seconds = sys.argv[1] if len(sys.argv) > 1 else "30"
    with (
        open("job.log", "w") as log,
        subprocess.Popen([sys.executable, "-c", _JOB], stdout=subprocess.PIPE, stderr=log, text=True) as job,
    ):
        try:
            assert job.stdout is not None
            job.stdout.readline()
            for call in (
                "census import census as command; command({pid}, rows=6)",
                "census import census as command; command({pid}, rows=6, pause=True)",
                "attach import attach as command; command({pid}, '{seconds}s')",
            ):
                source = f"from memtriage.cli.{call.format(pid=job.pid, seconds=seconds)}"
                print(source, flush=True)
                subprocess.run([sys.executable, "-c", source], check=False)
        finally:
            job.kill()


if __name__ == "__main__":
    main()
