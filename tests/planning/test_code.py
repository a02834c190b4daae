"""The code that a plan prints is what it simulated: run as printed, it has the same peak."""

import pytest
import torch

import memtriage
from memtriage.planning.evaluate import Evaluator
from memtriage.planning.rungs.adapters import LORA
from memtriage.planning.rungs.checkpointing import CHECKPOINTING
from memtriage.planning.rungs.loss import CHUNKED_LOSS
from memtriage.planning.rungs.precision import AUTOCAST, WHOLE
from memtriage.planning.rungs.settings import ATTENTION
from memtriage.prediction.gpu_kinds import machine
from support.training import training

ROOM = 1 << 40


def language_model(device, code=""):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_implementation="eager",
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(device).train()
    names = {"model": model, "torch": torch, "Optimizer": torch.optim.AdamW}
    exec(code.replace(", ...", ""), names)
    optimizer = names.get("optimizer") or torch.optim.AdamW(names["model"].parameters())

    def step():
        ids = torch.randint(0, 8192, (4, 256), device=device)
        names["model"](input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def blocks(device, code=""):
    from torch import nn

    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)]
    )
    model = model.to(device)
    exec(code, {"model": model, "torch": torch})
    return training(
        model, lambda: model(torch.randn(4096, 256, device=device)).float().sum(), torch.optim.AdamW
    )


CASES = [
    (language_model, ATTENTION, -1),
    (language_model, CHUNKED_LOSS, -1),
    (language_model, CHECKPOINTING, 0),
    (language_model, WHOLE, -1),
    (language_model, LORA, -1),
    (blocks, CHECKPOINTING, -1),
    (blocks, CHECKPOINTING, 1),
    (blocks, AUTOCAST, -1),
]


@pytest.fixture(scope="module")
def evaluators():
    return {
        build: Evaluator(
            build, machine("h200"), tuple(map(int, torch.__version__.split(".")[:2])), "", 2, ROOM
        )
        for build in (language_model, blocks)
    }


@pytest.mark.parametrize(("build", "rung", "way"), CASES)
def test_the_printed_code_has_the_simulated_peak(build, rung, way, evaluators):
    if rung is LORA:
        pytest.importorskip("peft")
    evaluator = evaluators[build]
    change = rung.offer(evaluator.facts())[0][way]
    simulated = evaluator.of((change,)).peak
    printed = memtriage.predict(lambda device: build(device, change.code["torch"]))
    assert simulated.allocated == pytest.approx(max(step.peak_allocated for step in printed.steps), rel=1e-4)
    assert simulated.reserved == pytest.approx(max(step.peak_reserved for step in printed.steps), rel=1e-2)
    assert simulated.allocated < evaluator.of(()).peak.allocated
