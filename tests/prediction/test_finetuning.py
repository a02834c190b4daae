"""A configuration trained by a library's own trainer: LoRA, QLoRA, DDP, FSDP, and the tasks of TRL."""

import json

import pytest
import torch

from memtriage.cli import app
from memtriage.prediction import finetuning
from memtriage.prediction.api import predict_program
from memtriage.prediction.build import BuildError
from memtriage.prediction.finetuning import Finetuning
from memtriage.prediction.hf import TrainingArguments, build_from_config
from support.llama import HIDDEN, IN_LAYERS, INNER, LAYERS, LLAMA, NORMS, WORDS

pytest.importorskip("transformers")
pytest.importorskip("peft")

OTHERS = 2 * WORDS * HIDDEN + NORMS
"""Numbers of the embedding, the output layer and the norms."""
ATTENTION_OF_RANK = LAYERS * 2 * (HIDDEN + HIDDEN)
"""Numbers of adapters on `q_proj` and `v_proj` (peft's choice for Llama), for each rank."""
ALL_OF_RANK = LAYERS * (4 * (HIDDEN + HIDDEN) + 3 * (HIDDEN + INNER))
STRAY_SCALARS = 8 * 512
"""Blocks of single numbers that the Trainer keeps besides: its loss, its norm, its count of items."""
SMALL = {"batch": 2, "seq": 64}


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    return file


def predicted(config, **arguments):
    ranks = arguments.get("fsdp") or arguments.get("ddp") or 1
    return predict_program(
        Finetuning(config, TrainingArguments(**{**SMALL, **arguments})), world_size=ranks, explain=True
    )


@pytest.mark.parametrize(
    ("arguments", "weight", "adapters"),
    [
        ({}, 2, 8 * ATTENTION_OF_RANK),
        ({"lora_r": 4, "lora_targets": "q_proj,v_proj", "precision": "fp32"}, 4, 4 * ATTENTION_OF_RANK),
        ({"lora_r": 2, "lora_targets": "all-linear", "precision": "bf16"}, 2, 2 * ALL_OF_RANK),
    ],
)
def test_adapters_alone_have_states_and_frozen_weights_are_in_16_bits(arguments, weight, adapters, config):
    found = predicted(config, method="lora", **arguments)
    assert found.by_owner["parameter"] == weight * (IN_LAYERS + OTHERS) + 4 * adapters
    assert found.by_owner["optimizer state"] == 2 * 4 * adapters


@pytest.mark.parametrize("checkpointed", [False, True])
def test_parameters_and_states_are_those_of_a_real_run(checkpointed, config, tmp_path):
    """On the host, where every adapter has states only if it got a gradient."""
    arguments = {"method": "lora", "lora_r": 4, "gradient_checkpointing": checkpointed}
    trainer = Finetuning(config, TrainingArguments(**SMALL, **arguments)).trainer(str(tmp_path), 1)
    trainer.train()
    real = {
        "parameter": trainer.model.parameters(),
        "optimizer state": (
            value
            for state in trainer.optimizer.state.values()
            for value in state.values()
            if value.dim()  # counts of steps are not on the device
        ),
    }
    found = predicted(config, **arguments)
    for owner, tensors in real.items():
        assert found.by_owner[owner] == sum(tensor.nbytes for tensor in tensors)


def test_the_trainer_is_the_one_that_the_build_function_follows(config):
    arguments = TrainingArguments(batch=4, seq=128, gradient_accumulation=2)
    traced = predict_program(Finetuning(config, arguments))
    followed = predict_program(build_from_config(config, arguments))
    assert traced.peak_reserved == followed.peak_reserved
    assert traced.peak_phase == followed.peak_phase
    assert abs(traced.peak_allocated - followed.peak_allocated) <= STRAY_SCALARS
    for owner in ("parameter", "gradient", "optimizer state", "workspace", "temporary"):
        assert traced.by_owner[owner] == followed.by_owner[owner]


def test_ranks_of_fsdp_have_their_shares_and_those_of_ddp_all(config):
    count = IN_LAYERS + OTHERS
    shared, copied = (predicted(config, **{kind: 4}) for kind in ("fsdp", "ddp"))
    assert shared.by_owner["optimizer state"] == 2 * 4 * count / 4
    assert copied.by_owner["optimizer state"] == 2 * 4 * count
    assert copied.by_owner["parameter"] == 4 * count
    assert copied.by_owner["communication buffer"] >= 4 * count


def test_linear_layers_of_qlora_are_in_4_bits_and_the_rest_as_peft_prepares_it(config, capsys):
    """By the command: bitsandbytes has its kernels for CUDA only if it was not imported before the trace."""
    pytest.importorskip("bitsandbytes")
    arguments = ["--method", "qlora", "--lora-r", "4", "--batch", "2", "--seq", "64"]
    assert app.main(["predict", "--hf-config", str(config), "--json", *arguments]) == 0
    by_owner = json.loads(capsys.readouterr().out)["by_owner"]
    adapters = 4 * ATTENTION_OF_RANK
    assert by_owner["parameter"] == IN_LAYERS / 2 + 4 * OTHERS + 4 * adapters
    assert by_owner["optimizer state"] == 2 * 4 * adapters


@pytest.mark.parametrize(
    ("task", "method", "models", "shape"),
    [
        ("sft", "full", 1, "2x64"),
        ("dpo", "full", 2, "4x64"),  # chosen and rejected; and a model for reference
        ("dpo", "lora", 1, "4x64"),
        ("grpo", "full", 1, "2x64"),
    ],
)
def test_tasks_of_trl_train_on_samples_of_the_length(task, method, models, shape, config):
    pytest.importorskip("trl")
    found = predicted(config, task=task, method=method, precision="fp32")
    count = IN_LAYERS + OTHERS
    adapters = 8 * ATTENTION_OF_RANK if method == "lora" else 0
    assert found.by_owner["parameter"] == 4 * (models * count + adapters)
    assert found.by_owner["optimizer state"] == 2 * 4 * (adapters or count)
    assert any(f"input_ids {shape} " in given for given in found.context.values())


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        ({"method": "lora"}, "peft"),
        ({"method": "qlora"}, "bitsandbytes"),
        ({"task": "dpo"}, "trl"),
        ({"ddp": 2}, "accelerate"),
    ],
)
def test_a_library_that_is_not_installed(arguments, package, config, monkeypatch):
    monkeypatch.setattr(finetuning, "find_spec", lambda name: None if name == package else name)
    with pytest.raises(BuildError, match=f"needs {package}, which is not installed: pip install {package}"):
        Finetuning(config, TrainingArguments(**arguments))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"method": "lora", "lora_targets": "no_such_layer"}, "Target modules"),
        ({"method": "lora", "optimizer": "magic"}, "magic.* is not a valid OptimizerNames"),
    ],
)
def test_what_a_library_refuses_is_one_line(arguments, said, config):
    with pytest.raises(BuildError, match=f"LlamaForCausalLM cannot be trained so: .*{said}") as refused:
        predicted(config, **arguments)
    assert "\n" not in str(refused.value)


def test_trl_gets_no_images(config):
    pytest.importorskip("trl")
    named = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    config.write_text(json.dumps(named))
    with pytest.raises(BuildError, match="TRL needs the processor of LlavaForConditionalGeneration"):
        Finetuning(config, TrainingArguments(task="sft"))


def test_nothing_is_left_of_the_folder_and_torch_is_as_before(config, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = sorted(tmp_path.iterdir())
    predicted(config, method="lora")
    assert sorted(tmp_path.iterdir()) == before
    assert torch.is_grad_enabled()
