"""Plans a workload for a budget, or trains it with the changes of a plan under that budget.

    python planned.py plan NAME BUDGET FILE
    python planned.py train FILE chosen|cheaper

`plan` needs no GPU and leaves the plan in FILE; `train` prints what came of three steps as JSON.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from memtriage.allocator.settings import parse_version
from memtriage.model.units import parse_size
from memtriage.planning.api import MARGIN, STEPS
from memtriage.planning.changes import changed
from memtriage.planning.evaluate import Evaluator
from memtriage.planning.ladder import ladder
from memtriage.planning.rungs import knobs
from memtriage.planning.search import LadderSearch
from memtriage.prediction.gpu_kinds import machine

GPU = "h200"
TRAINED_STEPS = 3


class Block(nn.Module):
    def __init__(self, width, dtype):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, dtype=dtype)
        self.down = nn.Linear(4 * width, width, dtype=dtype)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, width, depth, dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList(Block(width, dtype) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def training(model, device, shape, dtype=torch.float32, optimizer=torch.optim.AdamW, **zero):
    model = model.to(device)
    optimizer = optimizer(model.parameters())

    def step():
        model(torch.randn(shape, dtype=dtype, device=device)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(**zero)

    return model, optimizer, step


def micro_batch(device, micro_batch=64):
    return training(Blocks(1024, 8), device, (micro_batch, 512, 1024))


def narrow_blocks(device):
    return training(Blocks(1024, 8, torch.bfloat16), device, (64, 512, 1024), torch.bfloat16)


def wide_layers(device):
    layers = [nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16) for _ in range(12)]
    return training(nn.Sequential(*layers), device, (4, 8192), torch.bfloat16)


def kept_gradients(device):
    model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16) for _ in range(12)])
    return training(model, device, (16384, 8192), torch.bfloat16, torch.optim.SGD, set_to_none=False)


def single_precision(device):
    layers = [nn.Linear(2048, 2048) for _ in range(14)]
    return training(nn.Sequential(*layers), device, (65536, 2048))


def language(model, device, batch, length):
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        ids = torch.randint(0, model.config.vocab_size, (batch, length), device=device)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def llama(**settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=8,
        bos_token_id=1,
        eos_token_id=2,
        **settings,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def eager_attention(device):
    model = llama(vocab_size=1024, num_hidden_layers=6, attn_implementation="eager")
    return language(model, device, 8, 2048)


def large_vocabulary(device):
    model = llama(vocab_size=64000, num_hidden_layers=2, attn_implementation="sdpa")
    return language(model, device, 8, 2048)


def two_changes(device, batch=8):
    model = llama(vocab_size=1024, num_hidden_layers=6, attn_implementation="eager")
    return language(model, device, batch, 2048)


WORKLOADS = {
    each.__name__: each
    for each in (
        micro_batch,
        narrow_blocks,
        wide_layers,
        kept_gradients,
        single_precision,
        eager_attention,
        large_vocabulary,
        two_changes,
    )
}


def make_plan(name, budget, path):
    budget, kind = parse_size(budget, "budget"), machine(GPU)
    room = int(budget * (1 - MARGIN)) - kind.outside
    evaluator = Evaluator(WORKLOADS[name], kind, parse_version(None), "", STEPS, room)
    facts = evaluator.facts()
    found = LadderSearch(evaluator, ladder("", world_size=1), frozenset()).run(facts)
    cheaper = found.cheaper or ()
    path.write_bytes(
        pickle.dumps(
            {
                "name": name,
                "facts": facts,
                "budget": budget,
                "limit": budget - kind.outside,
                "fits": found.evaluated.fits,
                "chosen": [change.action for change in found.changes],
                "chosen_needs": found.evaluated.peak.needs,
                "chosen_allocated": found.evaluated.peak.allocated,
                "chosen_reserved": found.evaluated.peak.reserved,
                "cheaper": [change.action for change in cheaper],
                "cheaper_needs": evaluator.of(cheaper).peak.needs,
                "conf": {
                    which: ",".join(change.conf for change in changes if change.conf)
                    for which, changes in (("chosen", found.changes), ("cheaper", cheaper))
                },
            }
        )
    )


def train(path, which):
    """Under the limit of the plan; the options of the allocator come from the environment."""
    made = pickle.loads(path.read_bytes())
    knobs.SIMULATED = made["facts"].batch.value if made["facts"].batch else 1  # every micro-batch is run
    actions = made[which]
    offered = [
        change
        for rung in ladder("", world_size=1)
        if not isinstance(offer := rung.offer(made["facts"]), str)
        for track in offer
        for change in track
    ]
    changes = tuple(next(each for each in offered if each.action == action) for action in actions)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(made["limit"] / total)
    steps, reserved, refused = 0, [], None
    try:
        _, _, step = changed(WORKLOADS[made["name"]], changes)(torch.device("cuda", 0))
        for _ in range(TRAINED_STEPS):
            step()
            torch.cuda.synchronize()
            steps += 1
            reserved.append(torch.cuda.max_memory_reserved())
    except torch.OutOfMemoryError as error:
        refused = str(error)
    print(
        json.dumps(
            {
                "steps": steps,
                "reserved": torch.cuda.max_memory_reserved(),
                "reserved_by_step": reserved,
                "allocated": torch.cuda.max_memory_allocated(),
                "retries": torch.cuda.memory_stats()["num_alloc_retries"],
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1] == "plan":
        make_plan(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    else:
        train(Path(sys.argv[2]), sys.argv[3])
