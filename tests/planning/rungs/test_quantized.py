"""Layers of 4 bits: their bytes by arithmetic, and what a step with them allocates."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from memtriage.planning.evaluate import SMALLEST, Evaluator, drop_before_training
from memtriage.planning.facts import Facts, HuggingFace
from memtriage.planning.rungs.adapters import RANK
from memtriage.planning.rungs.quantized import QLORA, FourBit
from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.lifetimes import FREE, AllocationTrace, LifetimeEvent, Marker

WIDTH = 1024
MIB = 1 << 20
FACTS = Facts(
    batch=None,
    accumulation=None,
    length=None,
    optimizers=(),
    keeps_gradients=False,
    autocast=False,
    parameter_types=frozenset({torch.bfloat16}),
    trained=1,
    frozen=False,
    levels=(),
    called=frozenset(),
    recomputed=frozenset(),
    huggingface=HuggingFace("sdpa", True, True, "gradient_checkpointing", False),
    parallel="",
)


def test_a_weight_takes_half_a_byte_an_element_and_its_scales():
    layer = FourBit(torch.empty(WIDTH, 2 * WIDTH, dtype=torch.bfloat16), None)
    elements = 2 * WIDTH * WIDTH
    assert layer.weight.nbytes == elements // 2
    # 0.127 bits an element, as the authors of QLoRA count, and the tables of levels.
    scales = sum(buffer.nbytes for name, buffer in layer.named_buffers() if "levels" not in name)
    assert 8 * scales / elements == pytest.approx(0.127, abs=0.001)


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_reach_the_input_alone(autocast):
    layer = FourBit(torch.empty(8, 16), nn.Parameter(torch.zeros(8)))
    rows = torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layer(rows).sum().backward()
    assert rows.grad.shape == rows.shape
    assert layer.weight.grad is None and layer.bias.grad is None


def llama(device, micro_batch=1):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=128,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        ids = torch.randint(0, 128, (micro_batch, 16), device=device)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def test_quantized_load_takes_no_room_for_whole_weights():
    pytest.importorskip("peft")
    weights = 2 * (4 + 3 * 4) * WIDTH * WIDTH
    evaluator = Evaluator(llama, machine("h200"), (2, 13), "", 2, 1 << 40)
    (track,) = QLORA.offer(evaluator.facts()).tracks
    found = evaluator.of(track).peak
    kept = found.by_owner["parameter"] + found.by_owner["buffer"]
    assert weights // 2 < kept < weights * 3 // 4  # and adapters, embeddings, norms
    assert found.reserved < evaluator.of(()).peak.by_owner["parameter"] + 64 * MIB  # of workspaces


def test_it_says_what_it_does_to_the_result_and_what_to_write():
    (change,) = QLORA.offer(FACTS).tracks[0]
    assert change.maths == "different" and "approximate" in change.maths_note
    assert "BitsAndBytesConfig" in change.code["torch"] and f"r={RANK}" in change.code["torch"]


@pytest.mark.parametrize(
    ("differs", "why"),
    [
        ({"frozen": True}, "frozen already"),
        ({"parallel": "FSDP2"}, "FSDP2"),
        ({"huggingface": None}, "Transformers"),
    ],
)
def test_programs_that_it_is_not_for(differs, why):
    assert why in QLORA.offer(replace(FACTS, **differs)).absent


def test_what_is_gone_before_training_is_taken_out():
    events = [
        LifetimeEvent(0, 800),
        LifetimeEvent(1, 400),
        LifetimeEvent(0, FREE),
        LifetimeEvent(2, 70),
        LifetimeEvent(2, FREE),
        LifetimeEvent(1, FREE),
    ]
    recording = AllocationTrace(
        events=list(events), markers=[Marker(0, "build", -1), Marker(3, "forward", 0)]
    )
    drop_before_training(recording)
    assert recording.events == [LifetimeEvent(0, SMALLEST), *events[1:]]
