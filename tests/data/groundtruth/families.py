"""Workloads of further families, predicted before they were measured.

`families_h200.json` has what an H200 said of them. `build(spec, device)` returns `(model, optimizer, step)`;
a spec is `{"name": ...}`. Random weights; nothing is downloaded.
"""

from __future__ import annotations

import itertools
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
        "olmoe-ckpt",
        "qwen2-moe",
        "gemma2",
        "gemma3",
        "whisper",
        "clip",
        "bert-mlm",
        "t5-gated-ckpt",
        "distilbert-eager",
        "phi3-lora",
        "swin",
        "mamba",
        "llama-packed",
        "llama-fp16",
        "unet",
        "mobilenet",
        "opt-lengths",
        "dinov2",
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
    lengths = itertools.cycle([700, 1024, 512, 900])

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


def olmoe_ckpt(device: Any) -> Any:
    """Many small experts, normalised queries and keys, blocks computed again."""
    config = transformers.OlmoeConfig(
        hidden_size=1024,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=50304,
        num_experts=32,
        num_experts_per_tok=4,
    )
    model = transformers.OlmoeForCausalLM(config).to(torch.bfloat16).to(device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=AGAIN)
    return language(model, device, 4, 2048)


def qwen2_moe(device: Any) -> Any:
    """Experts beside a shared one, under autocast."""
    config = transformers.Qwen2MoeConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=32000,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=768,
        shared_expert_intermediate_size=1536,
    )
    return language(transformers.Qwen2MoeForCausalLM(config).to(device), device, 4, 1024, amp=True)


def gemma2(device: Any) -> Any:
    """Soft-capped logits, windows in every other layer, a large tied vocabulary."""
    config = transformers.Gemma2Config(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=128000,
        sliding_window=512,
    )
    return language(transformers.Gemma2ForCausalLM(config).to(torch.bfloat16).to(device), device, 2, 2048)


def gemma3(device: Any) -> Any:
    """Heads of 256 elements, five layers with windows for one without, under autocast."""
    config = transformers.Gemma3TextConfig(
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=64000,
        sliding_window=512,
    )
    model = transformers.Gemma3ForCausalLM(config).to(device)
    return language(
        model, device, 4, 1024, amp=True, optimizer=torch.optim.AdamW(model.parameters(), fused=True)
    )


def whisper(device: Any) -> Any:
    """Sound: convolutions in one dimension, an encoder and a decoder, under autocast."""
    config = transformers.WhisperConfig(
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
    )
    model = transformers.WhisperForConditionalGeneration(config).to(device)
    inputs = {
        "input_features": torch.randn(16, 80, 3000, device=device),
        "labels": torch.randint(0, 50000, (16, 128), device=device),
    }
    return labelled(model, torch.optim.AdamW(model.parameters()), inputs, amp=True)


def clip(device: Any) -> Any:
    """Images and texts with a contrastive loss, in bf16."""
    model = transformers.CLIPModel(transformers.CLIPConfig()).to(torch.bfloat16).to(device)
    inputs = {
        "pixel_values": torch.randn(128, 3, 224, 224, device=device, dtype=torch.bfloat16),
        "input_ids": torch.randint(0, 49000, (128, 77), device=device),
        "attention_mask": torch.ones(128, 77, dtype=torch.long, device=device),
        "return_loss": True,
    }
    return labelled(model, torch.optim.AdamW(model.parameters()), inputs, amp=False)


def bert_mlm(device: Any) -> Any:
    """Padded texts with a mask, masked words, a fused step, under autocast."""
    model = transformers.BertForMaskedLM(transformers.BertConfig()).to(device)
    lengths = torch.arange(200, 512, 10)[:32]
    mask = (torch.arange(512)[None] < lengths[:, None]).long().to(device)
    inputs = {
        "input_ids": torch.randint(0, 30000, (len(lengths), 512), device=device),
        "attention_mask": mask,
        "labels": torch.randint(0, 30000, (len(lengths), 512), device=device),
    }
    return labelled(model, torch.optim.AdamW(model.parameters(), fused=True), inputs, amp=True)


def t5_gated_ckpt(device: Any) -> Any:
    """T5 1.1 in bf16 with Adafactor, eager attention, blocks computed again by the reentrant kind."""
    config = transformers.T5Config(
        d_model=1024,
        d_ff=2816,
        num_layers=8,
        num_heads=16,
        vocab_size=32128,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    model = transformers.T5ForConditionalGeneration(config).to(torch.bfloat16).to(device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    inputs = {
        "input_ids": torch.randint(0, 32128, (16, 512), device=device),
        "labels": torch.randint(0, 32128, (16, 256), device=device),
    }
    return labelled(model, torch.optim.Adafactor(model.parameters()), inputs, amp=False)


def distilbert_eager(device: Any) -> Any:
    """Texts in classes, eager attention, single precision, momentum."""
    config = transformers.DistilBertConfig(num_labels=5, attn_implementation="eager")
    model = transformers.DistilBertForSequenceClassification(config).to(device)
    inputs = {
        "input_ids": torch.randint(0, 30000, (32, 256), device=device),
        "attention_mask": torch.ones(32, 256, dtype=torch.long, device=device),
        "labels": torch.randint(0, 5, (32,), device=device),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    return labelled(model, optimizer, inputs, amp=False)


def phi3_lora(device: Any) -> Any:
    """Joined projections with adapters, blocks computed again."""
    config = transformers.Phi3Config(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=32064,
        pad_token_id=0,
    )
    model = transformers.Phi3ForCausalLM(config).to(torch.bfloat16).to(device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=AGAIN)
    model.enable_input_require_grads()
    adapters = peft.LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.05)
    return language(peft.get_peft_model(model, adapters), device, 4, 2048)


def swin(device: Any) -> Any:
    """Shifted windows, under autocast."""
    model = transformers.SwinForImageClassification(transformers.SwinConfig(num_labels=1000)).to(device)
    return labelled(model, torch.optim.AdamW(model.parameters()), images(device), amp=True)


def mamba(device: Any) -> Any:
    """A state space model without kernels of its own."""
    config = transformers.MambaConfig(hidden_size=512, num_hidden_layers=4, vocab_size=32000, state_size=16)
    return language(transformers.MambaForCausalLM(config).to(device), device, 4, 128)


def llama(device: Any, **settings: Any) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        bos_token_id=1,
        eos_token_id=2,
        **settings,
    )
    return transformers.LlamaForCausalLM(config).to(device)


def llama_packed(device: Any) -> Any:
    """Four documents in one row, distinguished by their positions, under autocast."""
    model = llama(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    positions = torch.cat([torch.arange(length) for length in (700, 1500, 900, 996)])[None].to(device)
    ids = torch.randint(0, 32000, tuple(positions.shape), device=device)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def llama_fp16(device: Any) -> Any:
    """fp16 with a scaler, three micro-batches of different shapes, norms clipped."""
    model = llama(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    scaler = torch.amp.GradScaler("cuda")

    def step() -> None:
        for batch, length in ((4, 1024), (8, 384), (2, 1536)):
            ids = torch.randint(0, 32000, (batch, length), device=device)
            with torch.autocast("cuda", torch.float16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss / 3
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return model, optimizer, step


class Twice(nn.Sequential):
    """Two convolutions with normalisation in groups."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(8, after),
            nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1),
            nn.GroupNorm(8, after),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Down and up again, with transposed convolutions."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        self.down = nn.ModuleList(Twice(*pair) for pair in zip((3, *widths), widths, strict=False))
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(deep, flat, 2, 2) for flat, deep in itertools.pairwise(widths)
        )
        self.up = nn.ModuleList(Twice(2 * width, width) for width in widths[:-1])
        self.out = nn.Conv2d(widths[0], 1, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        passed = []
        for level, layer in enumerate(self.down):
            image = layer(image if level == 0 else F.max_pool2d(image, 2))
            passed.append(image)
        for level in reversed(range(len(self.up))):
            image = self.up[level](torch.cat([self.grow[level](image), passed[level]], 1))
        return self.out(image)


def unet(device: Any) -> Any:
    """Segments images, under autocast, channels last."""
    model = UNet().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    image = torch.randn(16, 3, 256, 256, device=device).to(memory_format=torch.channels_last)
    truth = torch.rand(16, 1, 256, 256, device=device)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.binary_cross_entropy_with_logits(model(image).float(), truth)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def mobilenet(device: Any) -> Any:
    """Depthwise convolutions, under autocast."""
    model = transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config(num_labels=1000))
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return labelled(model, optimizer, images(device), amp=True)


def opt_lengths(device: Any) -> Any:
    """Padded batches of other lengths in every step, in bf16, with a scheduler."""
    config = transformers.OPTConfig(
        hidden_size=1024, ffn_dim=4096, num_hidden_layers=12, num_attention_heads=16, dropout=0.1
    )
    model = transformers.OPTForCausalLM(config).to(torch.bfloat16).to(device)
    model.train()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    lengths = itertools.cycle([[512, 300, 411, 498], [800, 1011, 640, 77], [650, 640, 321, 333]])

    def step() -> None:
        each = torch.tensor(next(lengths))
        mask = (torch.arange(int(each.max()))[None] < each[:, None]).long().to(device)
        ids = torch.randint(3, 50000, tuple(mask.shape), device=device)
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return model, optimizer, step


def dinov2(device: Any) -> Any:
    """Only the last blocks are trained; the others are frozen."""
    model = transformers.Dinov2ForImageClassification(transformers.Dinov2Config(num_labels=100)).to(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("classifier", "dinov2.encoder.layer.1")))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inputs = images(device)
    inputs["labels"] = torch.randint(0, 100, (64,), device=device)
    return labelled(model, torch.optim.AdamW(trained), inputs, amp=False)
