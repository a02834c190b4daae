"""Layers of 4 bits: their bytes by arithmetic, and what a step with them allocates."""

import pytest
import torch
from torch import nn

import memtriage
from memtriage.predict.lifetimes import FREE, Event, Marker, Recording
from memtriage.predict.plan.evaluate import SMALLEST, drop_before_training
from memtriage.predict.plan.rungs.adapters import RANK
from memtriage.predict.plan.rungs.quantized import FourBit

WIDTH = 1024
MIB = 1 << 20


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
        num_hidden_layers=8,
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


def test_weights_that_only_fit_in_four_bits():
    pytest.importorskip("peft")
    weights = 8 * (4 + 3 * 4) * WIDTH * WIDTH
    # Neither the whole weights in bf16 nor their way to the device have room beside what lies outside.
    budget = 767 * MIB + weights * 2 - 8 * MIB
    plain = memtriage.plan(llama, budget, allow=["LoRA"])
    found = memtriage.plan(llama, budget, allow=["QLoRA"])
    assert not plain.fits and found.fits
    step = found.steps[-1]
    assert step.rung == "QLoRA" and step.maths == "different" and "approximate" in step.maths_note
    assert "BitsAndBytesConfig" in step.code["torch"] and f"r={RANK}" in step.code["torch"]
    kept = found.after.by_owner["parameter"] + found.after.by_owner["buffer"]
    assert weights // 2 < kept < weights * 5 // 8  # and adapters, embeddings, norms


def test_what_is_gone_before_training_is_taken_out():
    events = [Event(0, 800), Event(1, 400), Event(0, FREE), Event(2, 70), Event(2, FREE), Event(1, FREE)]
    recording = Recording(events=list(events), markers=[Marker(0, "build", -1), Marker(3, "forward", 0)])
    drop_before_training(recording)
    assert recording.events == [Event(0, SMALLEST), *events[1:]]
