"""Programs that nobody looked at while the search for blocks was written: `prime.py --unseen`.

`PROGRAMS` has their build functions, as `memtriage.predict` takes them. Random weights; needs transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn


def training(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any], amp: bool) -> Any:
    """A step without accumulation; the same inputs each time."""
    model.train()
    kind = next(model.parameters()).device.type

    def step() -> None:
        with torch.autocast(kind, torch.bfloat16, enabled=amp):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def tokens(vocabulary: int, device: Any, *shape: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, shape, device=device)


def bart_large(device: Any) -> Any:
    """An encoder and a decoder under autocast, with sources longer than targets."""
    config = transformers.BartConfig()
    model = transformers.BartForConditionalGeneration(config).to(device)
    inputs = {
        "input_ids": tokens(config.vocab_size, device, 8, 768),
        "labels": tokens(config.vocab_size, device, 8, 256),
    }
    return training(model, torch.optim.AdamW(model.parameters()), inputs, amp=True)


def wav2vec2(device: Any) -> Any:
    """Ten seconds of speech through convolutions and twelve layers, with CTC."""
    config = transformers.Wav2Vec2Config(layerdrop=0.0, apply_spec_augment=False, ctc_zero_infinity=True)
    model = transformers.Wav2Vec2ForCTC(config).to(device)
    inputs = {
        "input_values": torch.randn(8, 160_000, device=device),
        "labels": tokens(config.vocab_size, device, 8, 120),
    }
    return training(model, torch.optim.AdamW(model.parameters(), fused=True), inputs, amp=True)


def segformer(device: Any) -> Any:
    """SegFormer B2: 150 classes of each pixel, in single precision."""
    config = transformers.SegformerConfig(
        hidden_sizes=[64, 128, 320, 512], depths=[3, 4, 6, 3], decoder_hidden_size=768, num_labels=150
    )
    model = transformers.SegformerForSemanticSegmentation(config).to(device)
    inputs = {
        "pixel_values": torch.randn(8, 3, 512, 512, device=device),
        "labels": torch.randint(150, (8, 512, 512), device=device),
    }
    return training(model, torch.optim.AdamW(model.parameters(), foreach=True), inputs, amp=False)


def gpt_neox_ckpt(device: Any) -> Any:
    """Pythia 410m in bf16 with activation checkpointing."""
    config = transformers.GPTNeoXConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    model = transformers.GPTNeoXForCausalLM(config).to(device, torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = tokens(config.vocab_size, device, 8, 2048)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return training(model, torch.optim.AdamW(model.parameters(), fused=True), inputs, amp=False)


def electra_tokens(device: Any) -> Any:
    """Electra's discriminator: small outputs, eager attention, SGD with momentum."""
    config = transformers.ElectraConfig(
        embedding_size=768,
        hidden_size=768,
        intermediate_size=3072,
        num_attention_heads=12,
        attn_implementation="eager",
    )
    model = transformers.ElectraForPreTraining(config).to(device)
    inputs = {
        "input_ids": tokens(config.vocab_size, device, 32, 384),
        "labels": torch.randint(2, (32, 384), device=device),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return training(model, optimizer, inputs, amp=True)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "bart-large": bart_large,
    "wav2vec2": wav2vec2,
    "segformer": segformer,
    "gpt-neox-ckpt": gpt_neox_ckpt,
    "electra-tokens": electra_tokens,
}
