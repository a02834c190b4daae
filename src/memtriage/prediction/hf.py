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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from memtriage.prediction.build import BuildError

PRECISIONS: Final = ("fp32", "bf16", "amp-bf16", "fp16-amp")
MAX_GRADIENT_NORM: Final = 1.0
"""`max_grad_norm` of `transformers.TrainingArguments`."""
LEARNING_RATE: Final = 5e-5
"""`learning_rate` of `transformers.TrainingArguments`."""
IGNORED_LABEL: Final = -100
"""Label of what the loss leaves out, `ignore_index` of torch's cross-entropy."""

_AUTOCAST: Final[dict[str, torch.dtype]] = {"amp-bf16": torch.bfloat16, "fp16-amp": torch.float16}
_SUM_OVER_ITEMS: Final = "num_items_in_batch"
# As `Trainer.get_decay_parameter_names`.
_WITHOUT_DECAY: Final = ("bias", "layernorm", "rmsnorm")
_NORM: Final = "norm"
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

    Raises:
        BuildError: a number is not positive, or a name is unknown.
    """

    batch: int = 8
    seq: int = 2048
    precision: str = "amp-bf16"
    optimizer: str = "adamw"
    gradient_checkpointing: bool = False
    gradient_accumulation: int = 1
    attention: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "gradient_accumulation"):
            if getattr(self, name) < 1:
                raise BuildError(f"{name}={getattr(self, name)}; expected at least 1")
        for name, known in (("precision", PRECISIONS), ("optimizer", _OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise BuildError(f"{name}={getattr(self, name)!r}; expected one of {', '.join(known)}")


def build_from_config(path: Path, arguments: TrainingArguments) -> Callable[..., Any]:
    """The build function of a model that is configured in a file, as `Trainer` would train it.

    Its keywords are those of `TrainingArguments` that a plan may change.

    Args:
        path: a model's `config.json`, or the folder that it is in.

    Raises:
        BuildError: transformers is not installed, or the file is none, no configuration, or of a model that
            transformers does not have or cannot compute a loss for.
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
    kind = _architecture(library, config, file)

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
        model = _model(kind, config, asked).to(device)
        if asked.gradient_checkpointing:
            _checkpoint(model)
        model.train()
        optimizer = _optimizer(library, model, asked)
        return model, optimizer, _Step(model, optimizer, asked, device)

    return build


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
        raise BuildError(f"{file} is not a configuration of {model_type!r}: {_line(error)}") from error


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


def _model(kind: Any, config: Any, arguments: TrainingArguments) -> Any:
    # v5 takes the sub-configurations' types from it too.
    config.use_cache = False
    extra = {} if arguments.attention is None else {"attn_implementation": arguments.attention}
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    try:
        return kind._from_config(config, dtype=dtype, **extra)
    except (ImportError, ValueError) as error:
        raise BuildError(f"{kind.__name__} cannot be built: {_line(error)}") from error


def _checkpoint(model: Any) -> None:
    # Transformers 5 renamed it.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable()
    except ValueError as error:
        raise BuildError(f"{type(model).__name__} cannot be checkpointed: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


# Optimizers


def _optimizer(library: types.ModuleType, model: nn.Module, arguments: TrainingArguments) -> Any:
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    kept = _without_decay(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (others if name in kept else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": 0.0},
        {"params": others, "weight_decay": 0.0},
    ]
    return _OPTIMIZERS[arguments.optimizer](library, groups)


def _adamw(library: types.ModuleType, groups: list[dict[str, Any]]) -> Any:
    return torch.optim.AdamW(groups, lr=LEARNING_RATE)


def _fused_adamw(library: types.ModuleType, groups: list[dict[str, Any]]) -> Any:
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)


def _sgd(library: types.ModuleType, groups: list[dict[str, Any]]) -> Any:
    return torch.optim.SGD(groups, lr=LEARNING_RATE)


def _sgd_with_momentum(library: types.ModuleType, groups: list[dict[str, Any]]) -> Any:
    return torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=0.9)


def _adafactor(library: types.ModuleType, groups: list[dict[str, Any]]) -> Any:
    return library.Adafactor(groups, lr=LEARNING_RATE, scale_parameter=False, relative_step=False)


def _adagrad(library: types.ModuleType, groups: list[dict[str, Any]]) -> Any:
    return torch.optim.Adagrad(groups, lr=LEARNING_RATE)


def _rmsprop(library: types.ModuleType, groups: list[dict[str, Any]]) -> Any:
    return torch.optim.RMSprop(groups, lr=LEARNING_RATE)


_OPTIMIZERS: Final[dict[str, Callable[[types.ModuleType, list[dict[str, Any]]], Any]]] = {
    "adamw": _adamw,
    "adamw-fused": _fused_adamw,
    "sgd": _sgd,
    "sgd-momentum": _sgd_with_momentum,
    "adafactor": _adafactor,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
    # As `TrainingArguments.optim` calls them.
    "adamw_torch": _adamw,
    "adamw_torch_fused": _fused_adamw,
}


def _without_decay(model: nn.Module) -> set[str]:
    """Names of the parameters in the Trainer's second group: foreach kernels run group by group."""
    names = set()
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            lower = full.lower()
            norm = any(part == _NORM or part.endswith(f"_{_NORM}") for part in lower.split("."))
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


def _batch(model: Any, arguments: TrainingArguments, device: Any) -> dict[str, torch.Tensor]:
    """A micro-batch: made by the collator on the host, then sent to the device."""
    made = {**_INPUTS[model.main_input_name](model, arguments), **_labels(model, arguments)}
    taken = inspect.signature(type(model).forward).parameters
    return {name: value.to(device) for name, value in made.items() if name in taken}


# The step


class _Step:
    """One optimizer step of `Trainer`."""

    def __init__(self, model: Any, optimizer: Any, arguments: TrainingArguments, device: Any) -> None:
        self._model = model
        self._optimizer = optimizer
        self._arguments = arguments
        self._device = device
        self._autocast = _AUTOCAST.get(arguments.precision)
        self._scaler = torch.amp.GradScaler("cuda") if self._autocast is torch.float16 else None
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
        self._batches = [_batch(self._model, self._arguments, self._device) for _ in range(count)]
        items = self._items()
        for batch in self._batches:
            loss = self._micro_batch(batch, items)
            if torch.isnan(loss) or torch.isinf(loss):
                continue
            self._total_loss += loss
        parameters = self._model.parameters()
        if self._scaler is None:
            norm = nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
            self._optimizer.step()
        else:
            self._scaler.unscale_(self._optimizer)
            norm = nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
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
        if self._scaler is not None:
            self._scaler.scale(loss).backward()
        else:
            loss.backward()
        return loss.detach()

    def _loss(self, batch: dict[str, torch.Tensor], items: torch.Tensor | None) -> torch.Tensor:
        given: dict[str, Any] = dict(batch) if items is None else {**batch, _SUM_OVER_ITEMS: items}
        if self._autocast is None:
            outputs = self._model(**given)
        else:
            outputs = self._under_autocast(given)
        loss: torch.Tensor = outputs["loss"]
        return loss

    def _under_autocast(self, given: dict[str, Any]) -> Any:
        with torch.autocast("cuda", dtype=self._autocast):
            outputs = self._model(**given)
        # As `convert_outputs_to_fp32` of Accelerate: the outputs in 16 bits go when all copies are there.
        return dict(_in_single_precision(outputs))


def _in_single_precision(outputs: Any) -> Iterator[tuple[str, Any]]:
    for name, value in outputs.items():
        half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
        yield name, value.float() if half else value
