"""Training with kernels of other packages: build functions, and what measures them.

    packages.py measure NAME             on a GPU: its peaks by step, as JSON
    packages.py predict NAME             what is predicted, as JSON
    packages.py compare [NAME ...]       both, a line for each step; without its package a name is left out

Needs transformers; `liger` needs liger-kernel, `fp8` and `fp8-compiled` torchao, `qlora` and `adam8bit`
bitsandbytes, `qlora` also peft. What is compiled needs Triton.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import peaks
import torch
from torch import nn

STEPS = 3
BATCH, LENGTH = 8, 1024
NOT_THERE = 42
"""Exit status where a package is missing."""


def llama(device: Any, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=8, use_cache=False, **options,
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def trained(model: Any, device: Any, optimizer: Any = None) -> Any:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        ids = torch.randint(0, 32_000, (BATCH, LENGTH), device=device)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def build_liger(device: Any) -> Any:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    return trained(llama(device), device)


def build_fp8(device: Any, compiled: bool = False) -> Any:
    from torchao.float8 import convert_to_float8_training

    model = llama(device)
    convert_to_float8_training(model, module_filter_fn=lambda module, name: "lm_head" not in name)
    if compiled:
        model.compile(dynamic=False)
    return trained(model, device)


def build_qlora(device: Any) -> Any:
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model

    model = llama("cpu")
    for module in list(model.modules()):
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear) and name != "lm_head":
                size = layer.in_features, layer.out_features
                quantized = bnb.nn.Linear4bit(
                    *size, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
                )
                quantized.load_state_dict(layer.state_dict())
                setattr(module, name, quantized)
    model = get_peft_model(model.to(device), LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
    return trained(model, device)


def build_adam8bit(device: Any) -> Any:
    import bitsandbytes as bnb

    model = llama(device)
    return trained(model, device, bnb.optim.AdamW8bit(model.parameters(), lr=1e-4))


def build_flex(device: Any) -> Any:
    model = llama(device, attn_implementation="flex_attention")
    model.compile(dynamic=False)
    return trained(model, device)


BUILDS = {
    "liger": build_liger,
    "fp8": build_fp8,
    "fp8-compiled": functools.partial(build_fp8, compiled=True),
    "qlora": build_qlora,
    "adam8bit": build_adam8bit,
    "flex": build_flex,
}


def measure(name: str) -> peaks.Steps:
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    try:
        _model, _optimizer, step = BUILDS[name](device)
    except ImportError as missing:
        print(missing, file=sys.stderr)
        sys.exit(NOT_THERE)
    return peaks.measured(step, STEPS)


def predict(name: str) -> peaks.Steps:
    import memtriage

    return peaks.predicted(memtriage.predict(BUILDS[name], steps=STEPS, gpu="h100"))


def _apart(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def compare(names: list[str]) -> None:
    with ThreadPoolExecutor(1) as gpu, ThreadPoolExecutor(len(names)) as cores:
        real = {name: gpu.submit(_apart, "measure", name) for name in names}
        promised = {name: cores.submit(_apart, "predict", name) for name in names}
        for name in names:
            status, found, error = real[name].result()
            if status == NOT_THERE:
                print(f"{name}: left out, {error.splitlines()[-1]}", flush=True)
                continue
            bad, predicted, why = promised[name].result()
            if status or bad:
                print(f"{name} failed: {(error if status else why)[-1500:]}", flush=True)
                continue
            last = (json.loads(text.splitlines()[-1]) for text in (predicted, found))
            peaks.print_differences(name, *last)


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        compare(sys.argv[2:] or list(BUILDS))
    else:
        print(json.dumps({"measure": measure, "predict": predict}[sys.argv[1]](sys.argv[2])))
