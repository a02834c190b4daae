"""Workloads of further families, predicted before they were measured.

`families_h200.json` has what an H200 said of them. `build(spec, device)` returns `(model, optimizer, step)`;
a spec is `{"name": ...}`. Random weights; nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from torch import nn

SPECS = [
    {"name": name}
    for name in (
        "mixtral",
        "t5",
        "qwen2-ckpt",
        "qwen3",
        "vit",
        "convnext",
        "llama-lora-ckpt",
        "gpt2-adafactor",
        "gpt2-lengths",
        "convnet",
    )
]
AGAIN = {"use_reentrant": False}


def build(spec: dict[str, Any], device: Any) -> Any:
    return globals()[spec["name"].replace("-", "_")](device)


def language(
    model: Any, device: Any, batch: int, length: int, *, amp: bool = False, optimizer: Any = None
) -> Any:
    """A causal language model with clipped gradients."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-4)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), device=device)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def labelled(model: Any, optimizer: Any, inputs: dict[str, Any], *, amp: bool) -> Any:
    """A model that returns its loss."""
    model.train()

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def images(device: Any) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(64, 3, 224, 224, device=device),
        "labels": torch.randint(0, 1000, (64,), device=device),
    }


def mixtral(device: Any) -> Any:
    config = transformers.MixtralConfig(
        hidden_size=768,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=32000,
        num_local_experts=8,
    )
    model = transformers.MixtralForCausalLM(config).to(torch.bfloat16).to(device)
    return language(model, device, 8, 1024)


def t5(device: Any) -> Any:
    config = transformers.T5Config(
        d_model=768, d_ff=3072, num_layers=12, num_heads=12, vocab_size=32128, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).to(device)
    inputs = {
        "input_ids": torch.randint(0, 32128, (8, 512), device=device),
        "labels": torch.randint(0, 32128, (8, 256), device=device),
    }
    return labelled(model, torch.optim.AdamW(model.parameters()), inputs, amp=True)


def qwen2_ckpt(device: Any) -> Any:
    config = transformers.Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).to(device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=AGAIN)
    return language(model, device, 4, 2048)


def qwen3(device: Any) -> Any:
    config = transformers.Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    )
    return language(transformers.Qwen3ForCausalLM(config).to(device), device, 4, 1024, amp=True)


def vit(device: Any) -> Any:
    model = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000)).to(device)
    return labelled(model, torch.optim.AdamW(model.parameters(), fused=True), images(device), amp=True)


def convnext(device: Any) -> Any:
    model = transformers.ConvNextForImageClassification(transformers.ConvNextConfig(num_labels=1000)).to(
        device
    )
    return labelled(model, torch.optim.AdamW(model.parameters()), images(device), amp=False)


def llama_lora_ckpt(device: Any) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).to(device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=AGAIN)
    model.enable_input_require_grads()
    adapters = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj", "up_proj"])
    return language(peft.get_peft_model(model, adapters), device, 4, 2048)


def gpt2_adafactor(device: Any) -> Any:
    config = transformers.GPT2Config(n_layer=24, n_embd=1024, n_head=16)
    model = transformers.GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.Adafactor(model.parameters())
    return language(model, device, 4, 1024, amp=True, optimizer=optimizer)


def gpt2_lengths(device: Any) -> Any:
    """Batches of 700, 1,024, 512 and 900 tokens in turn, with an attention mask."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    lengths = iter([700, 1024, 512, 900] * 8)

    def step() -> None:
        ids = torch.randint(0, 50257, (8, next(lengths)), device=device)
        mask = torch.ones_like(ids)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def convnet(device: Any) -> Any:
    """Convolutions of many kinds in a row: large, strided, depthwise, 1x1."""
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.Conv2d(128, 256, 5, 2, 2, bias=False),
        nn.BatchNorm2d(256),
        nn.SiLU(),
        nn.Conv2d(256, 256, 3, padding=1, groups=256),
        nn.Conv2d(256, 512, 1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 100),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(128, 3, 160, 160, device=device)
    classes = torch.randint(0, 100, (128,), device=device)

    def step() -> None:
        F.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
