"""QLoRA: adapters over weights that are kept in 4 bits.

They are simulated by linear layers that hold and allocate the same as in bitsandbytes (`Linear4bit`,
`MatMul4Bit`, `dequantize_4bit`), because bitsandbytes quantizes with its own kernels.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from memtriage.planning.changes import OTHER_TASK, Change, Offer, Rung
from memtriage.planning.facts import Facts
from memtriage.planning.rungs.adapters import RANK, add_adapters, linear_layers
from memtriage.prediction.build import Built

BLOCK: Final = 64
"""Elements that share a scale (`blocksize` of `quantize_4bit`)."""
SCALES: Final = 256
"""Scales that share a scale of their own (`compress_statistics` of `quantize_4bit`: double quantization)."""
LEVELS: Final = 16


class FourBit(nn.Linear):  # type: ignore[misc]
    """A frozen linear layer in NF4 with double quantization.

    Args:
        weight: what is quantized, (out, in).
        bias: stays as it is.
    """

    def __init__(self, weight: torch.Tensor, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        blocks = -(-weight.numel() // BLOCK)

        def made(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=weight.device)

        self.weight = nn.Parameter(made(-(-weight.numel() // 2), torch.uint8)[:, None], requires_grad=False)
        self.bias = bias
        self.register_buffer("scales", made(blocks, torch.uint8))
        self.register_buffer("scales_of_scales", made(-(-blocks // SCALES), torch.float32))
        self.register_buffer("levels", made(LEVELS, torch.float32))
        self.register_buffer("levels_of_scales", made(SCALES, torch.float32))
        self.register_buffer("offset", torch.zeros((), device=weight.device))

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, for as long as a product lasts: from scales in single precision."""
        scales = torch.empty(self.scales.shape, dtype=torch.float32, device=self.scales.device)
        shape = (self.out_features, self.in_features)
        made = torch.empty(shape, dtype=self.dtype, device=scales.device)
        del scales
        return made.to(dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cuda"):
            input = input.to(torch.get_autocast_dtype("cuda"))
        product: torch.Tensor = _FourBitProduct.apply(input, self, self.bias)
        return product.clone()  # as peft's layer does with what it gets from a 4-bit one


class _FourBitProduct(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, layer: FourBit, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer = layer
        bias = None if bias is None else bias.to(input.dtype)
        return functional.linear(input, layer.dequantized(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return torch.matmul(gradient, ctx.layer.dequantized(gradient.dtype)), None, None


def _edit(built: Built) -> Built:
    names = linear_layers(built.model)
    for name in names:
        where, _, last = name.rpartition(".")
        parent = built.model.get_submodule(where)
        layer = getattr(parent, last)
        # GPT-2's layers have theirs transposed.
        weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()
        setattr(parent, last, FourBit(weight.detach(), layer.bias))
        layer.weight = None
    return add_adapters(built, names)


def _offer(facts: Facts) -> Offer:
    if facts.frozen:
        return Offer(absent="a part of the parameters is frozen already")
    if facts.parallel:
        return Offer(absent=f"4-bit weights under {facts.parallel} are not simulated")
    if facts.huggingface is None:
        return Offer(absent="there is no Transformers model, which BitsAndBytesConfig needs")
    if find_spec("peft") is None:
        return Offer(absent="its adapters are simulated with peft, which is not installed: pip install peft")
    change = Change(
        rung="QLoRA",
        action=f"4-bit weights (NF4, double quantization) and LoRA of rank {RANK} on all linear layers",
        speed="slower: every weight is dequantized in forward and again in backward; measure it",
        maths="different",
        maths_note="other capacity, for finetuning only; and approximate: weights are rounded to 4 bits",
        code={
            "torch": "import peft, torch\n"
            "from transformers import BitsAndBytesConfig  # pip install bitsandbytes\n"
            "config = BitsAndBytesConfig(\n"
            '    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,\n'
            "    bnb_4bit_compute_dtype=torch.bfloat16,\n"
            ")\n"
            "model = Model.from_pretrained(..., quantization_config=config, dtype=torch.bfloat16)\n"
            f'model = peft.get_peft_model(model, peft.LoraConfig(r={RANK}, target_modules="all-linear"))\n'
            "optimizer = Optimizer([each for each in model.parameters() if each.requires_grad], ...)\n"
            "# peft.prepare_model_for_kbit_training is not part of the figures: it copies embeddings, norms\n"
            "# and the output layer to float32, and switches checkpointing on",
        },
        edit=_edit,
        simulated_by="layers with the buffers of bitsandbytes: half a byte an element, a byte for each "
        f"{BLOCK} of them, and the dequantized weight while a product lasts",
        loads=True,
        displaces=frozenset({"LoRA", "8-bit optimizer", "offloaded optimizer"}),
    )
    return Offer(((change,),))


QLORA = Rung("QLoRA", "M13", _offer, on_request=OTHER_TASK)
