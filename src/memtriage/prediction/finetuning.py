"""The trainer of Transformers or TRL with a model of a configuration: the trainer's own code is traced.

Model, adapters, 4-bit weights, tokenizer and data are made as programs make them, by the libraries; weights
are random, and each sample has the length that is asked for. Nothing is downloaded.

Known limitation: completions of GRPO are made elsewhere, as by a server of vLLM: generating is not traced.
"""

from __future__ import annotations

import importlib
import math
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from memtriage.prediction.build import BuildError
from memtriage.prediction.hf import TrainingArguments, collated, configured, image_for, model_of, one_line
from memtriage.prediction.script import Script

_OPTIMIZERS: Final = {"adamw": "adamw_torch", "adamw-fused": "adamw_torch_fused"}
"""Names of `TrainingArguments.optim`, where they differ."""
_NEEDS: Final = {
    "lora": ("peft",),
    "qlora": ("peft", "bitsandbytes"),
    **dict.fromkeys(("sft", "dpo", "grpo"), ("trl", "datasets")),
}
_GENERATIONS: Final = 8
"""`num_generations` of `trl.GRPOConfig`, where batches can be divided by it."""
_PAD, _END, _WORD = "<pad>", "<end>", "word"


class Finetuning(Script):
    """The call of `train()`.

    Raises:
        BuildError: a library is not installed, or the configuration cannot be used (`hf.configured`).
    """

    def __init__(self, path: Path, arguments: TrainingArguments) -> None:
        self._transformers, self._kind, self._config = configured(path)
        for asked in (arguments.method, arguments.task):
            for package in ("accelerate", *_NEEDS.get(asked, ())):
                if find_spec(package) is None:
                    raise BuildError(
                        f"{asked!r} needs {package}, which is not installed: pip install {package}"
                    )
        if arguments.task != "causal" and hasattr(self._kind, "get_image_features"):
            raise BuildError(
                f"task={arguments.task!r}; TRL needs the processor of {self._kind.__name__} for its images: "
                "expected causal"
            )
        self._path = path
        super().__init__("transformers" if arguments.task == "causal" else "trl", module=True)
        self._given = arguments
        self._ranks = arguments.ddp or arguments.fsdp or 1

    def execute(self, steps: int) -> None:
        # The Trainer says in the environment to Accelerate that it shards.
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ):
            try:
                trainer = self.trainer(folder, steps + 1)
            except (ImportError, ValueError) as error:
                raise BuildError(f"{self._kind.__name__} cannot be trained so: {one_line(error)}") from error
            trainer.train()

    def trainer(self, folder: str, steps: int) -> Any:
        """The trainer of so many steps, which may write to a folder."""
        given = self._given
        optimizer = _OPTIMIZERS.get(given.optimizer, given.optimizer)
        options: dict[str, Any] = {
            "output_dir": folder,
            "max_steps": steps,
            "per_device_train_batch_size": given.batch,
            "gradient_accumulation_steps": given.gradient_accumulation,
            "gradient_checkpointing": given.gradient_checkpointing,
            "optim": optimizer.replace("-", "_"),
            "bf16": given.precision == "amp-bf16",
            "fp16": given.precision == "fp16-amp",
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        if given.fsdp:
            options["fsdp"] = "full_shard auto_wrap"
        samples = steps * given.batch * given.gradient_accumulation * self._ranks
        if given.task == "causal":
            return self._of_transformers(options, samples)
        return self._of_trl(options, samples)

    def _of_transformers(self, options: dict[str, Any], samples: int) -> Any:
        plain = model_of(self._kind, self._config, self._given)
        image = image_for(plain, self._path)
        inner = model = self._loaded(plain)
        if (adapters := self._adapters()) is not None:
            peft = importlib.import_module("peft")
            if self._given.method == "qlora":
                model = peft.prepare_model_for_kbit_training(
                    model, use_gradient_checkpointing=self._given.gradient_checkpointing
                )
            model = peft.get_peft_model(model, adapters)
        return self._transformers.Trainer(
            model,
            self._transformers.TrainingArguments(**options),
            data_collator=lambda numbers: collated(inner, self._given, image),
            train_dataset=list(range(samples)),
        )

    def _of_trl(self, options: dict[str, Any], samples: int) -> Any:
        trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
        given = self._given
        prompt = given.seq // 2
        completion = given.seq - prompt
        texts = {"prompt": _text(prompt), "chosen": _text(completion), "rejected": _text(completion)}
        more: dict[str, Any] = {}
        if given.task == "sft":
            texts = {"text": _text(given.seq)}
        elif given.task == "dpo" and given.method == "full":
            more["ref_model"] = model_of(self._kind, self._config, given)
        elif given.task == "grpo":
            texts = {"prompt": _text(prompt)}
            batches = given.batch * given.gradient_accumulation * self._ranks
            options |= {
                "num_generations": math.gcd(_GENERATIONS, batches),
                "max_completion_length": completion,
            }
            more |= {"reward_funcs": _rewards, "rollout_func": _rollout}
        if given.task != "grpo":
            options["max_length"] = given.seq
        name = given.task.upper()
        return getattr(trl, f"{name}Trainer")(
            model=self._loaded(model_of(self._kind, self._config, given)),
            args=getattr(trl, f"{name}Config")(**options),
            train_dataset=datasets.Dataset.from_dict({key: [text] * samples for key, text in texts.items()}),
            processing_class=_tokenizer(self._transformers),
            peft_config=self._adapters(),
            **more,
        )

    def _loaded(self, model: Any) -> Any:
        """The model on the host, or with 4-bit weights on the device, as `from_pretrained` loads it."""
        given = self._given
        if given.method != "qlora":
            return model
        quantization = self._transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=given.dtype,
            # Shards are of one type.
            **({"bnb_4bit_quant_storage": given.dtype} if given.fsdp else {}),
        )
        return self._kind.from_pretrained(
            None,
            config=self._config,
            state_dict=model.state_dict(),
            quantization_config=quantization,
            dtype=given.dtype,
            device_map={"": torch.cuda.current_device()},
        )

    def _adapters(self) -> Any:
        given = self._given
        if given.method == "full":
            return None
        options: dict[str, Any] = {} if given.lora_r is None else {"r": given.lora_r}
        if given.lora_targets is not None:
            named = given.lora_targets.split(",")
            options["target_modules"] = named if len(named) > 1 else named[0]
        return importlib.import_module("peft").LoraConfig(**options)


def _text(words: int) -> str:
    return " ".join([_WORD] * words)


def _tokenizer(library: Any) -> Any:
    """One token a word."""
    tokenizers = importlib.import_module("tokenizers")
    vocabulary = {_PAD: 0, _END: 1, _WORD: 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=_WORD))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return library.PreTrainedTokenizerFast(tokenizer_object=made, pad_token=_PAD, eos_token=_END)


def _rewards(completions: list[str], **others: Any) -> list[float]:
    return [float(number) for number, _ in enumerate(completions)]


def _rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """What a server would send: completions of the greatest length."""
    length = trainer.max_completion_length
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": [[2] * length for _ in prompts],
        "logprobs": [[-1.0] * length for _ in prompts],
    }
