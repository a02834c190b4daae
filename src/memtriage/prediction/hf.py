"""A build function from a Hugging Face model configuration and the training arguments of a `Trainer`.

The step is what one process of `transformers.Trainer` runs: all micro-batches of the step are sent to the
device first; the loss comes from the model's own labels, divided by the number of items of the whole step
where the model takes it; gradients are clipped to a norm of 1, and set to None after the optimizer's step.
With autocast the model's outputs are copied to fp32, as Accelerate does.

Nothing is downloaded: the weights are random.
"""

from __future__ import annotations

import importlib
import inspect
import json
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from memtriage.model.target import SIZES
from memtriage.prediction.build import BuildError

PRECISIONS: Final = ("fp32", "bf16", "amp-bf16", "fp16-amp")
METHODS: Final = ("full", "lora", "qlora")
TASKS: Final = ("causal", "sft", "dpo", "grpo")
MAX_GRADIENT_NORM: Final = 1.0
"""`max_grad_norm` of `transformers.TrainingArguments`."""
LEARNING_RATE: Final = 5e-5
"""`learning_rate` of `transformers.TrainingArguments`."""
IGNORED_LABEL: Final = -100
"""Label of what the loss leaves out, `ignore_index` of torch's cross-entropy."""

_AUTOCAST: Final[dict[str, torch.dtype]] = {"amp-bf16": torch.bfloat16, "fp16-amp": torch.float16}
# As `Trainer.get_decay_parameter_names`.
_WITHOUT_DECAY: Final = ("bias", "layernorm", "rmsnorm")
_HEADS: Final = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModelForSpeechSeq2Seq",
)
"""Tried in this order for a configuration that names no architecture."""


@dataclass(frozen=True, slots=True)
class TrainingArguments:
    """How a model is trained.

    Attributes:
        batch: samples of a micro-batch.
        seq: tokens of a sample; without meaning for images.
        precision: `fp32`; `bf16` (weights and all); `amp-bf16` and `fp16-amp` (fp32 weights under autocast,
            the latter with a GradScaler).
        optimizer: name of the optimizer.
        gradient_checkpointing: whether blocks are computed again in backward.
        gradient_accumulation: micro-batches of an optimizer step.
        attention: attention implementation of Transformers (`sdpa`, `eager`, ...); None for its choice.
        method: `full`, `lora` (of peft), or `qlora` (besides, linear layers are in 4 bits by bitsandbytes).
        lora_r: rank of the adapters; None for peft's own.
        lora_targets: which layers get adapters: `all-linear`, or names with commas between; None for peft's
            choice for the architecture.
        task: `causal` (the model's own loss), or the trainer of TRL.
        ddp, fsdp: ranks of a job whose model the Trainer wraps or shards; None for neither.

    Raises:
        BuildError: a number is not positive, a name is unknown, or two do not go together.
    """

    batch: int = SIZES["batch"]
    seq: int = SIZES["seq"]
    precision: str = "amp-bf16"
    optimizer: str = "adamw"
    gradient_checkpointing: bool = False
    gradient_accumulation: int = 1
    attention: str | None = None
    method: str = "full"
    lora_r: int | None = None
    lora_targets: str | None = None
    task: str = "causal"
    ddp: int | None = None
    fsdp: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "gradient_accumulation", "lora_r", "ddp", "fsdp"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise BuildError(f"{name}={number}; expected at least 1")
        choices = {"precision": PRECISIONS, "method": METHODS, "task": TASKS}
        # A trainer knows more optimizers than these, and says so.
        for name, known in (choices if self.by_trainer else {**choices, "optimizer": _OPTIMIZERS}).items():
            if getattr(self, name) not in known:
                raise BuildError(f"{name}={getattr(self, name)!r}; expected one of {', '.join(known)}")
        if self.method == "full" and (self.lora_r or self.lora_targets):
            raise BuildError("lora_r and lora_targets are for adapters; expected method lora or qlora")
        if self.ddp and self.fsdp:
            raise BuildError("use only one of ddp and fsdp")

    @property
    def by_trainer(self) -> bool:
        """Whether a library's own trainer is traced, instead of a build function with the same step."""
        return self.method != "full" or self.task != "causal" or bool(self.ddp or self.fsdp)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights. Frozen ones are in 16 bits under autocast too."""
        if self.precision == "bf16":
            return torch.bfloat16
        return torch.float32 if self.method == "full" else _AUTOCAST.get(self.precision, torch.float32)


def build_from_config(path: Path, arguments: TrainingArguments) -> Callable[..., Any]:
    """The build function of a model that is configured in a file, as `Trainer` would train it.

    Its keywords are those of `TrainingArguments` that a plan may change.

    Args:
        path: a model's `config.json`, or the folder that it is in.

    Raises:
        BuildError: transformers is not installed, or the file is none, no configuration, or of a model that
            transformers does not have or cannot compute a loss for.
    """
    library, kind, config = configured(path)

    def build(
        device: Any,
        per_device_train_batch_size: int = arguments.batch,
        gradient_accumulation_steps: int = arguments.gradient_accumulation,
        max_length: int = arguments.seq,
    ) -> Any:
        asked = replace(
            arguments,
            batch=per_device_train_batch_size,
            gradient_accumulation=gradient_accumulation_steps,
            seq=max_length,
        )
        model = model_of(kind, config, asked)
        image = image_for(model, path)
        model.to(device)
        if asked.gradient_checkpointing:
            _checkpoint(model)
        model.train()
        optimizer = _optimizer(library, model, asked)
        return model, optimizer, _Step(model, optimizer, asked, device, image)

    return build


def configured(path: Path) -> tuple[types.ModuleType, Any, Any]:
    """The module `transformers`, the class of a model, and its configuration.

    Raises:
        BuildError: as `build_from_config`.
    """
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise BuildError(
            "a Hugging Face configuration needs transformers, which is not installed; "
            "pip install 'memtriage[hf]'"
        ) from error
    file = path / "config.json" if path.is_dir() else path
    config = _config(library, file)
    return library, _architecture(library, config, file), config


def _config(library: types.ModuleType, file: Path) -> Any:
    try:
        given = json.loads(file.read_text())
    except OSError as error:
        raise BuildError(f"{file}: {error.strerror or error}; expected a model's config.json") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BuildError(f"{file} is not JSON ({error}); expected a model's config.json") from error
    if not isinstance(given, dict) or not isinstance(given.get("model_type"), str):
        raise BuildError(f"{file} has no `model_type`; expected a model's config.json")
    model_type = given["model_type"]
    if model_type not in library.CONFIG_MAPPING:
        raise BuildError(
            f"{file}: transformers {library.__version__} has no model type {model_type!r}; expected one that "
            "it has, or a newer transformers (code of the model's own is not run)"
        )
    try:
        return library.CONFIG_MAPPING[model_type].from_dict(given)
    except Exception as error:  # whatever a configuration's checks raise: it is the file's fault
        raise BuildError(f"{file} is not a configuration of {model_type!r}: {one_line(error)}") from error


def _architecture(library: types.ModuleType, config: Any, file: Path) -> Any:
    """The class of the model."""
    names = config.architectures or []
    if names:
        kind = getattr(library, names[0], None)
        if kind is None or not hasattr(kind, "_from_config"):
            raise BuildError(f"{file}: transformers {library.__version__} has no architecture {names[0]!r}")
    else:
        mappings = (getattr(library, head)._model_mapping for head in _HEADS)
        kind = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
        if kind is None:
            raise BuildError(
                f"{file} names no architecture, and there is none with a usual loss for "
                f'{config.model_type!r}; expected `architectures`, as in ["LlamaForCausalLM"]'
            )
    if not _LABELS & inspect.signature(kind.forward).parameters.keys():
        raise BuildError(
            f"{file}: {kind.__name__} computes no loss from labels; name in `architectures` the one that is "
            'trained, as in ["LlamaForCausalLM"]'
        )
    if kind.main_input_name not in _INPUTS:
        raise BuildError(
            f"{file}: {kind.__name__} is fed with {kind.main_input_name!r}; expected a model of "
            f"{', '.join(_INPUTS)}: give a build function for others"
        )
    return kind


def model_of(kind: Any, config: Any, arguments: TrainingArguments) -> Any:
    """The model with random weights, on the host.

    Raises:
        BuildError: it cannot be built so.
    """
    # v5 takes the sub-configurations' types from it too.
    config.use_cache = False
    extra = {} if arguments.attention is None else {"attn_implementation": arguments.attention}
    try:
        return kind._from_config(config, dtype=arguments.dtype, **extra)
    except (ImportError, ValueError) as error:
        raise BuildError(f"{kind.__name__} cannot be built: {one_line(error)}") from error


def _checkpoint(model: Any) -> None:
    # Transformers 5 renamed it.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable()
    except ValueError as error:
        raise BuildError(f"{type(model).__name__} cannot be checkpointed: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """The text of an error that has several lines."""
    return " ".join(str(error).split())


# Optimizers


def _optimizer(library: types.ModuleType, model: nn.Module, arguments: TrainingArguments) -> Any:
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    kept = _without_decay(model)
    groups = [[each for name, each in trained if (name in kept) is other] for other in (False, True)]
    kind, options = _OPTIMIZERS[arguments.optimizer]
    return (kind or library.Adafactor)(
        [{"params": group, "weight_decay": 0.0} for group in groups], lr=LEARNING_RATE, **options
    )


_OPTIMIZERS: Final[dict[str, tuple[type[torch.optim.Optimizer] | None, dict[str, Any]]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adafactor": (None, {"scale_parameter": False, "relative_step": False}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    # As `TrainingArguments.optim` calls them.
    "adamw_torch": (torch.optim.AdamW, {}),
    "adamw_torch_fused": (torch.optim.AdamW, {"fused": True}),
}
"""Class and options by name; without a class, it is the Adafactor of Transformers."""


def _without_decay(model: nn.Module) -> set[str]:
    """Names of the parameters in the Trainer's second group: foreach kernels run group by group."""
    names = set()
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            lower = full.lower()
            norm = any(part == "norm" or part.endswith("_norm") for part in lower.split("."))
            if isinstance(module, nn.LayerNorm) or norm or any(word in lower for word in _WITHOUT_DECAY):
                names.add(full)
    return names


# Inputs


def _tokens(model: Any, arguments: TrainingArguments) -> dict[str, torch.Tensor]:
    config = model.config.get_text_config()
    shape = (arguments.batch, arguments.seq)
    ids = torch.randint(0, config.vocab_size, shape)
    return {"input_ids": ids, "attention_mask": torch.ones(shape, dtype=torch.int64)}


def _pixels(model: Any, arguments: TrainingArguments) -> dict[str, torch.Tensor]:
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", None) or _IMAGE_SIZE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", 3)
    return {"pixel_values": torch.randn(arguments.batch, channels, height, width)}


def _features(model: Any, arguments: TrainingArguments) -> dict[str, torch.Tensor]:
    # Whisper's encoder halves the frames by a strided convolution.
    frames = 2 * model.config.max_source_positions
    return {"input_features": torch.randn(arguments.batch, model.config.num_mel_bins, frames)}


_LABELS: Final = {"labels", "start_positions"}
_IMAGE_SIZE: Final = 224
"""Of image models whose configuration does not say (ConvNeXt, ResNet): ImageNet's usual size."""
_INPUTS: Final[dict[str, Callable[[Any, TrainingArguments], dict[str, torch.Tensor]]]] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_features": _features,
}


def _labels(model: Any, arguments: TrainingArguments) -> dict[str, torch.Tensor]:
    name = type(model).__name__
    if name.endswith("ForQuestionAnswering"):
        return {
            key: torch.randint(0, arguments.seq, (arguments.batch,))
            for key in ("start_positions", "end_positions")
        }
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        return {"labels": torch.randint(0, model.config.num_labels, (arguments.batch,))}
    classes = model.config.get_text_config().vocab_size
    if name.endswith("ForTokenClassification"):
        classes = model.config.num_labels
    return {"labels": torch.randint(0, classes, (arguments.batch, arguments.seq))}


@dataclass(frozen=True, slots=True)
class Image:
    """What an image processor makes of one image, and how many tokens of text stand for it."""

    inputs: dict[str, torch.Tensor]
    tokens: int


def image_for(model: Any, path: Path) -> Image | None:
    """An image for a model on the host that reads text and images; None for others.

    Its processor is that of a `preprocessor_config.json` next to the configuration, else of the architecture,
    for images of the configuration's size.

    Raises:
        BuildError: there is no such processor, or the model does not take what it makes.
    """
    if model.main_input_name != "input_ids" or not hasattr(model, "get_image_features"):
        return None
    folder = path if path.is_dir() else path.parent
    size = getattr(model.config.vision_config, "image_size", None)
    try:
        processors = importlib.import_module("transformers.models.auto.image_processing_auto")
        if (folder / "preprocessor_config.json").exists():
            processor = processors.AutoImageProcessor.from_pretrained(folder)
        else:
            kinds = processors.IMAGE_PROCESSOR_MAPPING[type(model.config)]
            processor = (kinds.get("pil") or kinds["torchvision"])(**_of_size(size))
        given = importlib.import_module("PIL.Image").new("RGB", (size or _IMAGE_SIZE,) * 2)
        inputs = {
            name: value
            for name, value in processor(images=[given], return_tensors="pt").items()
            if isinstance(value, torch.Tensor)
        }
        with torch.no_grad():
            taken = inspect.signature(model.get_image_features).parameters
            features = model.get_image_features(
                **{name: value for name, value in inputs.items() if name in taken}
            )
    except Exception as error:  # the library's own
        raise BuildError(f"no image can be made for {type(model).__name__}: {one_line(error)}") from error
    pooled = getattr(features, "pooler_output", features)
    each = pooled if isinstance(pooled, (list, tuple)) else [pooled]
    return Image(inputs, sum(feature.numel() // feature.shape[-1] for feature in each))


def _of_size(size: int | None) -> dict[str, Any]:
    """Settings of a processor for a vision tower with a fixed size of images."""
    square = {"height": size, "width": size}
    return {} if size is None else {"size": square, "crop_size": square}


def collated(model: Any, arguments: TrainingArguments, image: Image | None) -> dict[str, torch.Tensor]:
    """A micro-batch, as a collator makes it on the host; the tokens of an image come first.

    Raises:
        BuildError: a sample has too few tokens for the image.
    """
    made = {**_INPUTS[model.main_input_name](model, arguments), **_labels(model, arguments)}
    if image is not None:
        if image.tokens >= arguments.seq:
            raise BuildError(f"seq={arguments.seq}; an image takes {image.tokens} tokens: expected more")
        # No other token may be taken for one of an image or a video.
        ids = torch.ones_like(made["input_ids"])
        ids[:, : image.tokens] = model.config.image_token_id
        made["input_ids"] = ids
        made["mm_token_type_ids"] = made["token_type_ids"] = (ids == model.config.image_token_id).long()
        made |= {name: torch.cat([value] * arguments.batch) for name, value in image.inputs.items()}
    taken = inspect.signature(type(model).forward).parameters
    return {name: value for name, value in made.items() if name in taken}


# The step


class _Step:
    """One optimizer step of `Trainer`."""

    def __init__(
        self, model: Any, optimizer: Any, arguments: TrainingArguments, device: Any, image: Image | None
    ) -> None:
        self._model = model
        self._image = image
        self._optimizer = optimizer
        self._arguments = arguments
        self._device = device
        self._autocast = _AUTOCAST.get(arguments.precision)
        self._scaler = torch.amp.GradScaler("cuda", enabled=self._autocast is torch.float16)
        self._total_loss = torch.tensor(0.0, device=device)
        self._batches: list[dict[str, torch.Tensor]] = []
        taken = inspect.signature(type(model).forward).parameters.values()
        self._takes_items = bool(
            getattr(
                model,
                "accepts_loss_kwargs",
                any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken),
            )
        )

    def __call__(self) -> None:
        count = self._arguments.gradient_accumulation
        # The batches of the step before go when those of this one are there.
        self._batches = [
            {name: value.to(self._device) for name, value in made.items()}
            for made in (collated(self._model, self._arguments, self._image) for _ in range(count))
        ]
        items = self._items()
        for batch in self._batches:
            loss = self._micro_batch(batch, items)
            if torch.isnan(loss) or torch.isinf(loss):
                continue
            self._total_loss += loss
        self._scaler.unscale_(self._optimizer)
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRADIENT_NORM)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._model.zero_grad()
        del norm  # held until here, as by the Trainer, which may log it

    def _items(self) -> torch.Tensor | None:
        if not self._takes_items or "labels" not in self._batches[0]:
            return None
        return cast(torch.Tensor, sum(batch["labels"].ne(IGNORED_LABEL).sum() for batch in self._batches))

    def _micro_batch(self, batch: dict[str, torch.Tensor], items: torch.Tensor | None) -> torch.Tensor:
        loss = self._loss(batch, items)
        if items is None:
            loss = loss / self._arguments.gradient_accumulation
        self._scaler.scale(loss).backward()
        return loss.detach()

    def _loss(self, batch: dict[str, torch.Tensor], items: torch.Tensor | None) -> torch.Tensor:
        given: dict[str, Any] = dict(batch) if items is None else {**batch, "num_items_in_batch": items}
        if self._autocast is None:
            return cast(torch.Tensor, self._model(**given)["loss"])
        with torch.autocast("cuda", dtype=self._autocast):
            outputs = self._model(**given)
        # As `convert_outputs_to_fp32` of Accelerate: the outputs in 16 bits go when all copies are there.
        outputs = {
            name: value.float()
            if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
            else value
            for name, value in outputs.items()
        }
        return cast(torch.Tensor, outputs["loss"])
