"""From a Hugging Face configuration to the step that `Trainer` runs."""

import json
import sys

import pytest
import torch

from memtriage.prediction.api import predict_program
from memtriage.prediction.build import BuildError
from memtriage.prediction.hf import TrainingArguments, build_from_config
from support.llama import LLAMA

transformers = pytest.importorskip("transformers")

TEXT = {name: value for name, value in LLAMA.items() if name not in ("model_type", "architectures")}
MODELS = {
    "llama": LLAMA,
    "bert": {"model_type": "bert", "architectures": ["BertForQuestionAnswering"], **TEXT},
    "classifier": {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **TEXT},
    "t5": {
        "model_type": "t5",
        "d_model": 64,
        "d_ff": 128,
        "d_kv": 16,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 1000,
        "decoder_start_token_id": 0,
    },
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"], **TEXT},
}
SMALL = {"batch": 2, "seq": 64}


@pytest.fixture
def config(tmp_path):
    def write(content):
        file = tmp_path / "config.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file

    return write


def parameters(config):
    """Number of trained elements, as transformers itself makes the model."""
    given = dict(config)
    made = transformers.CONFIG_MAPPING[given["model_type"]].from_dict(given)
    name = (given.get("architectures") or ["T5ForConditionalGeneration"])[0]
    with torch.device("meta"):
        model = getattr(transformers, name)(made)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_models_of_many_kinds_have_their_parameters_and_states(name, config):
    prediction = predict_program(
        build_from_config(config(MODELS[name]), TrainingArguments(**SMALL, optimizer="adamw-fused"))
    )
    count = parameters(MODELS[name])
    assert prediction.by_owner["parameter"] == 4 * count
    # Two states, and a step count a parameter on the device.
    assert 2 * 4 * count < prediction.by_owner["optimizer state"] < 2 * 4 * count + 1024


@pytest.mark.parametrize(
    ("arguments", "weight", "states"),
    [
        ({"precision": "fp32", "optimizer": "sgd"}, 4, 0),
        ({"precision": "bf16", "optimizer": "sgd-momentum"}, 2, 2),
        ({"precision": "bf16", "gradient_checkpointing": True}, 2, 4),
        ({"precision": "fp16-amp", "gradient_accumulation": 2, "attention": "eager"}, 4, 8),
        ({"precision": "amp-bf16", "optimizer": "rmsprop"}, 4, 4),
    ],
)
def test_precision_and_optimizer_size_weights_and_states(arguments, weight, states, config):
    prediction = predict_program(build_from_config(config(LLAMA), TrainingArguments(**SMALL, **arguments)))
    count = parameters(LLAMA)
    assert prediction.by_owner["parameter"] == weight * count
    assert prediction.by_owner.get("optimizer state", 0) == states * count
    asked_for = arguments.get("attention") == "eager"
    assert any("attention (" in note for note in prediction.notes) is not asked_for


def test_adafactor_keeps_rows_and_columns(config):
    prediction = predict_program(
        build_from_config(config(LLAMA), TrainingArguments(**SMALL, optimizer="adafactor"))
    )
    assert 0 < prediction.by_owner["optimizer state"] < prediction.by_owner["parameter"] / 8


def test_checkpointing_lowers_the_activations(config):
    deep = {**LLAMA, "num_hidden_layers": 6}
    plain, checkpointed = (
        predict_program(build_from_config(config(deep), TrainingArguments(batch=8, seq=128, **extra)))
        for extra in ({}, {"gradient_checkpointing": True})
    )
    assert checkpointed.by_owner["activation"] < plain.by_owner["activation"]


VISION = {"hidden_size": 64, "intermediate_size": 128, "patch_size": 14}
QWEN_VL = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    **TEXT,
    "num_key_value_heads": 4,
    "image_token_id": 990,
    "video_token_id": 991,
    "vision_start_token_id": 992,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {**VISION, "depth": 2, "num_heads": 4, "out_hidden_size": 64},
}
"""Images of any size: 224 pixels, as ImageNet's."""
LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 990,
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {
        "model_type": "clip_vision_model", **VISION,
        "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56,
    },
}  # fmt: skip
IMAGES = [
    # Patches of 14 x 14 pixels, three colors and two frames; four patches are a token.
    (QWEN_VL, f"pixel_values {2 * 16 * 16}x{3 * 2 * 14 * 14} float32, image_grid_thw 2x3", 16 * 16 // 4),
    (LLAVA, "pixel_values 2x3x56x56 float32", (56 // 14) ** 2),
]


@pytest.mark.parametrize(("content", "shapes", "tokens"), IMAGES)
def test_each_sample_has_an_image_as_its_processor_makes_it(content, shapes, tokens, config):
    """The model itself compares the tokens of images with their features."""
    pytest.importorskip("PIL")
    file = config(content)
    fits = build_from_config(file, TrainingArguments(batch=2, seq=tokens + 1))
    context = predict_program(fits, explain=True).context
    assert shapes in context[f"input of {content['architectures'][0]}"]
    with pytest.raises(BuildError, match=f"seq={tokens}; an image takes {tokens} tokens: expected more"):
        predict_program(build_from_config(file, TrainingArguments(batch=2, seq=tokens)))


def test_a_processor_that_cannot_be_read_is_one_line(config, tmp_path):
    file = config(LLAVA)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(BuildError, match="no image can be made for LlavaForConditionalGeneration: ") as error:
        predict_program(build_from_config(file, TrainingArguments(**SMALL)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "has no `model_type`"),
        ({"hidden_size": 8}, "has no `model_type`"),
        ({"model_type": "abacus"}, "no model type 'abacus'"),
        ({**LLAMA, "architectures": ["AbacusForCausalLM"]}, "no architecture 'AbacusForCausalLM'"),
        ({**LLAMA, "architectures": ["LlamaModel"]}, "computes no loss"),
        ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}, "fed with 'input_values'"),
        ({"model_type": "clap"}, "names no architecture"),
        ({**LLAMA, "hidden_size": "wide"}, "not a configuration of 'llama'"),
    ],
)
def test_a_configuration_that_cannot_be_used(content, said, config):
    with pytest.raises(BuildError, match=said):
        build_from_config(config(content), TrainingArguments())


def test_a_configuration_that_is_not_there(tmp_path):
    with pytest.raises(BuildError, match="No such file"):
        build_from_config(tmp_path / "nowhere.json", TrainingArguments())
    with pytest.raises(BuildError, match=r"config\.json: No such file"):
        build_from_config(tmp_path, TrainingArguments())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch": 0}, "batch=0"),
        ({"gradient_accumulation": -1}, "gradient_accumulation=-1"),
        ({"precision": "fp8"}, "precision='fp8'; expected one of fp32"),
        ({"optimizer": "magic"}, "optimizer='magic'; expected one of adamw"),
        ({"method": "dora"}, "method='dora'; expected one of full, lora, qlora"),
        ({"task": "ppo"}, "task='ppo'; expected one of causal, sft, dpo, grpo"),
        ({"lora_targets": "all-linear"}, "for adapters; expected method lora or qlora"),
        ({"ddp": 2, "fsdp": 2}, "use only one of ddp and fsdp"),
        ({"method": "lora", "lora_r": 0}, "lora_r=0; expected at least 1"),
    ],
)
def test_training_arguments_are_checked(arguments, said):
    with pytest.raises(BuildError, match=said):
        TrainingArguments(**arguments)


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        (LLAMA, {"attention": "telepathy"}, "LlamaForCausalLM cannot be built"),
        (
            {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]},
            {"gradient_checkpointing": True},
            "cannot be checkpointed",
        ),
    ],
)
def test_what_the_model_cannot_do_is_said(content, arguments, said, config):
    build = build_from_config(config(content), TrainingArguments(**SMALL, **arguments))
    with pytest.raises(BuildError, match=said):
        predict_program(build)


def test_transformers_that_is_not_installed(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BuildError, match=r"pip install 'memtriage\[hf\]'"):
        build_from_config(config(LLAMA), TrainingArguments())
