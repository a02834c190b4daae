"""LoRA: small adapters are trained instead of the weights, which stay as they are."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Final

from torch import nn

from memtriage.planning.changes import Change, Rung
from memtriage.planning.facts import Facts, huggingface_in, inner_optimizer
from memtriage.prediction.build import Built

RANK: Final = 16


def add_adapters(built: Built) -> Built:
    """The program with adapters on its linear layers, which its optimizers train instead."""
    import peft
    from peft.tuners.tuners_utils import cast_adapter_dtype

    model = built.model
    config = peft.LoraConfig(r=RANK, target_modules=linear_layers(model))
    peft.inject_adapter_in_model(config, model, adapter_name="default")
    cast_adapter_dtype(model, adapter_name="default")  # to float32, as get_peft_model does
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for optimizer in map(inner_optimizer, built.optimizers):
        for group in optimizer.param_groups:
            group["params"], adapters = adapters, []
        optimizer.state.clear()
    return built


def linear_layers(model: nn.Module) -> list[str]:
    """Names of all linear layers but the output layer of a language model (peft's `all-linear`)."""
    inner = huggingface_in(model)
    output = None if inner is None else inner.get_output_embeddings()
    # GPT-2's linear layers, with transposed weights.
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", nn.Linear)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, conv1d)) and module is not output
    ]


def _offer(facts: Facts) -> Change | str:
    if facts.frozen:
        return "a part of the parameters is frozen already"
    if find_spec("peft") is None:
        return "it is simulated with peft, which is not installed: pip install peft"
    return Change(
        rung="LoRA",
        action=f"LoRA of rank {RANK} on all linear layers",
        speed="about none (M13)",
        maths="different",
        maths_note="other capacity; for finetuning only",
        code={
            "torch": "import peft\n"
            f'model = peft.get_peft_model(model, peft.LoraConfig(r={RANK}, target_modules="all-linear"))\n'
            "optimizer = Optimizer([each for each in model.parameters() if each.requires_grad], ...)",
        },
        edit=add_adapters,
        counts_work=True,
        displaces=frozenset({"8-bit optimizer", "offloaded optimizer"}),
    )


LORA = Rung("LoRA", "M13", _offer, on_request="it changes the task")
