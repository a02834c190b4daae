"""Predicted against measured: twelve fine-tunings by the trainers of Transformers and TRL.

    python benchmarks/finetunings.py predict predicted.json --jobs 4   # memtriage predict --hf-config, no GPU
    python benchmarks/finetunings.py measure measured.json             # the programs, on the GPU
    python benchmarks/finetunings.py table predicted.json measured.json

    python benchmarks/finetunings.py largest largest.json --jobs 4     # memtriage plan --maximize, no GPU
    python benchmarks/finetunings.py try tried.json --given largest.json
    python benchmarks/finetunings.py sizes largest.json tried.json

A program is `train` of this file: what a user would write with the libraries, not what memtriage traces.
Weights are random and the data made up. The peak is the highest after the first of three steps. `try` caps
the process to the budget, and trains with the found batch and with the first that is predicted to need more
than 2 % above the budget. Names after the file select rows. Configurations: `fits_models.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

MODELS: Final = Path(__file__).with_name("fits_models.json")
STEPS: Final = 3
LIMIT_S: Final = 300
"""A process that takes longer is stopped and shown as failed."""
MIB: Final = 1 << 20
GIB: Final = 1 << 30
OVER: Final = 0.02
"""Part of the budget by which a batch is predicted to exceed it that has to run out of memory."""
PEAKS: Final = ("peak_allocated", "peak_reserved")

ADAPTERS: Final = ["--lora-r", "16", "--lora-targets", "all-linear"]
ROWS: Final = {
    "causal, Llama-3.2-1B, full": ("Llama-3.2-1B", "--batch 4 --seq 2048"),
    "SFT, Qwen3-1.7B, full, 32k": ("Qwen3-1.7B", "--task sft --batch 1 --seq 32768 --precision bf16 --ck"),
    "SFT, Llama-3.2-3B, LoRA": ("Llama-3.2-3B", "--task sft --method lora --batch 2 --seq 4096"),
    "SFT, Llama-3.1-8B, LoRA, 8k": ("Llama-3.1-8B", "--task sft --method lora --batch 1 --seq 8192 --ck"),
    "SFT, Llama-3.1-8B, QLoRA, 16k": ("Llama-3.1-8B", "--task sft --method qlora --batch 1 --seq 16384 --ck"),
    "DPO, Qwen3-4B, LoRA": ("Qwen3-4B", "--task dpo --method lora --batch 2 --seq 1024"),
    "DPO, Llama-3.2-1B, full": ("Llama-3.2-1B", "--task dpo --batch 2 --seq 1024 --ck"),
    "GRPO, Qwen3-1.7B, LoRA": ("Qwen3-1.7B", "--task grpo --method lora --batch 8 --seq 1024"),
    "causal, PaliGemma-3B, LoRA": ("PaliGemma-3B", "--method lora --batch 2 --seq 1024"),
    "causal, LLaVA-1.5-7B, QLoRA": ("LLaVA-1.5-7B", "--method qlora --batch 1 --seq 1024 --ck"),
    "SFT, OLMoE-1B-7B, LoRA": ("OLMoE-1B-7B", "--task sft --method lora --batch 2 --seq 2048 --ck"),
    "SFT, gpt-oss-20b, LoRA": ("gpt-oss-20b", "--task sft --method lora --batch 1 --seq 4096 --ck"),
}  # fmt: skip
"""Model and options. The optimizer is fused AdamW."""
BUDGETS: Final = {
    "causal, Llama-3.2-1B, full": ("Llama-3.2-1B", "--seq 1024", 32),
    "causal, Llama-3.2-1B, full, checkpointing": ("Llama-3.2-1B", "--seq 4096 --ck", 34),
    "causal, Qwen3-1.7B, full, bf16": ("Qwen3-1.7B", "--seq 2048 --precision bf16", 24),
    "SFT, Llama-3.2-1B, full, checkpointing": ("Llama-3.2-1B", "--task sft --seq 8192 --ck", 34),
    "SFT, Llama-3.2-1B, LoRA": ("Llama-3.2-1B", "--task sft --method lora --seq 1024", 12),
    "SFT, Llama-3.2-3B, LoRA, checkpointing": (
        "Llama-3.2-3B",
        "--task sft --method lora --seq 2048 --ck",
        24,
    ),
    "SFT, Qwen3-1.7B, QLoRA, checkpointing": ("Qwen3-1.7B", "--task sft --method qlora --seq 2048 --ck", 16),
    "DPO, Llama-3.2-1B, LoRA": ("Llama-3.2-1B", "--task dpo --method lora --seq 1024", 24),
    "DPO, Llama-3.2-1B, full, checkpointing": ("Llama-3.2-1B", "--task dpo --seq 1024 --ck", 34),
    "causal, PaliGemma-3B, LoRA, checkpointing": ("PaliGemma-3B", "--method lora --seq 512 --ck", 16),
}
"""Model, options, and the process's budget in GiB."""


def main() -> int:
    if sys.argv[1:2] == ["train"]:
        train(*parsed(sys.argv[2:]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("predict", "measure", "table", "largest", "try", "sizes"))
    parser.add_argument("path", type=Path, help="the results' file; for tables what was predicted")
    parser.add_argument("names", nargs="*", help="rows; all by default. For tables what was measured")
    parser.add_argument("--given", type=Path, help="for try: what largest wrote")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    options = parser.parse_intermixed_args()
    if options.mode in ("table", "sizes"):
        pair = (json.loads(each.read_text()) for each in (options.path, Path(*options.names)))
        print((table if options.mode == "table" else sizes)(*pair))
        return 0
    rows = ROWS if options.mode in ("predict", "measure") else BUDGETS
    found = json.loads(options.given.read_text()) if options.given else {}
    work: dict[str, Callable[[str, Path], Any]] = {
        "predict": predicted,
        "measure": lambda name, config: measured(config, [*shared(*ROWS[name][1:])]),
        "largest": largest,
        "try": lambda name, config: tried(name, config, found[name]),
    }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        running = {}
        for name in options.names or rows:
            config = Path(folder) / rows[name][0] / "config.json"
            config.parent.mkdir(exist_ok=True)
            config.write_text(json.dumps(json.loads(MODELS.read_text())[rows[name][0]]["config"]))
            running[pool.submit(work[options.mode], name, config)] = name
        for done in as_completed(running):
            results[running[done]] = done.result()
            print(f"{running[done]:<34}{str(done.result())[:120]}", flush=True)
            options.path.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def shared(options: str) -> list[str]:
    """The options of `memtriage predict` and of `train`."""
    words = options.replace("--ck", "--gradient-checkpointing").split()
    return [
        *words,
        "--optimizer",
        "adamw_torch_fused" if "--method" in words or "--task" in words else "adamw-fused",
        *(ADAPTERS if "--method" in words else ()),
    ]


def run(arguments: list[str], hidden: bool) -> tuple[str, str, float]:
    """What a process printed, why it failed, and its seconds."""
    begun = time.monotonic()
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if hidden else {})}
    try:
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return "", f"not done after {LIMIT_S} s", LIMIT_S
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    failed = (lines[-1] if lines else f"status {done.returncode}") if done.returncode else ""
    return done.stdout, failed, round(time.monotonic() - begun, 1)


def predicted(name: str, config: Path) -> dict[str, Any]:
    options = ["--hf-config", str(config), "--json", "--steps", str(STEPS), *shared(ROWS[name][1])]
    printed, failed, seconds = run(["-m", "memtriage", "predict", *options], hidden=True)
    if failed:
        return {"failed": failed, "seconds": seconds}
    answer = json.loads(printed.splitlines()[-1])
    steps = [{kind: step[kind] for kind in PEAKS} for step in answer["steps"]]
    return {"steps": steps, "seconds": seconds, "notes": answer["notes"]}


def measured(config: Path, options: list[str], limit: int = 0) -> dict[str, Any]:
    printed, failed, seconds = run(
        [__file__, "train", str(config), "--limit", str(limit), *options], hidden=False
    )
    return (
        {"failed": failed, "seconds": seconds}
        if failed
        else {**json.loads(printed.splitlines()[-1]), "seconds": seconds}
    )


def largest(name: str, config: Path) -> dict[str, Any]:
    _, options, budget = BUDGETS[name]
    printed, failed, seconds = run(
        [
            "-m",
            "memtriage",
            "plan",
            "--hf-config",
            str(config),
            "--budget",
            f"{budget}GiB",
            "--maximize",
            "batch",
            "--json",
            *shared(options),
        ],
        hidden=True,
    )
    return {"seconds": seconds, **({"failed": failed} if failed else json.loads(printed.splitlines()[-1]))}


def tried(name: str, config: Path, found: dict[str, Any]) -> dict[str, Any]:
    """The found batch, and the first that is predicted to need clearly too much."""
    from memtriage.prediction.gpu_kinds import MEASURED, machine

    _, options, gib = BUDGETS[name]
    (row,) = found["found"]
    each = (row["next_needs"] - row["needs"]) // (row["next"] - row["batch"])
    over = row["next"]
    while row["needs"] + (over - row["batch"]) * each <= (1 + OVER) * gib * GIB:
        over += 1
    limit = gib * GIB - machine(MEASURED).outside
    return {
        str(size): measured(config, [*shared(options), "--batch", str(size)], limit)
        for size in (row["batch"], over)
    }


def parsed(arguments: list[str]) -> tuple[argparse.Namespace, Path]:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--task", default="causal")
    parser.add_argument("--method", default="full")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--precision", default="amp-bf16")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--optimizer")
    parser.add_argument("--lora-r", type=int)
    parser.add_argument("--lora-targets")
    parser.add_argument("--limit", type=int, default=0)
    options = parser.parse_args(arguments)
    return options, options.config


def train(options: argparse.Namespace, config: Path) -> None:
    """Train three steps, and print the peaks of each as JSON."""
    import torch
    import transformers
    from transformers import TrainerCallback

    steps: list[dict[str, int]] = []

    class Peaks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            steps.append(dict(zip(PEAKS, peaks, strict=True)))
            torch.cuda.reset_peak_memory_stats()

    cuda = torch.cuda.is_available()
    given = transformers.AutoConfig.from_pretrained(config.parent)
    given.use_cache = False
    kind = getattr(transformers, given.architectures[0])
    full_16 = options.precision == "bf16" or options.method != "full"
    dtype = torch.bfloat16 if full_16 else torch.float32

    def random_model() -> Any:
        with torch.device("cuda" if cuda else "cpu"):  # random numbers are slow on the host
            made = kind._from_config(given, dtype=dtype)
        return made.to("cpu")

    model = random_model()
    reference = random_model() if options.task == "dpo" and options.method == "full" else None
    if options.method == "qlora":
        model = kind.from_pretrained(
            None,
            config=given,
            state_dict=model.state_dict(),
            quantization_config=transformers.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            ),
            dtype=torch.bfloat16,
            device_map={"": 0},
        )
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if options.limit:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(options.limit / total)
    adapters = None
    if options.method != "full":
        import peft

        adapters = peft.LoraConfig(r=options.lora_r, target_modules=options.lora_targets)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(
            options,
            model,
            reference,
            adapters,
            {
                "output_dir": folder,
                "max_steps": STEPS,
                "per_device_train_batch_size": options.batch,
                "gradient_checkpointing": options.gradient_checkpointing,
                "optim": "adamw_torch_fused",
                "bf16": options.precision == "amp-bf16",
                "use_cpu": not cuda,
                "report_to": [],
                "save_strategy": "no",
                "disable_tqdm": True,
            },
        )
        trainer.add_callback(Peaks())
        trainer.train()
    gpu = torch.cuda.get_device_name() if cuda else "no GPU"
    print(json.dumps({"steps": steps, "gpu": gpu, "torch": torch.__version__}))


def trainer_of(
    options: argparse.Namespace, model: Any, reference: Any, adapters: Any, arguments: dict[str, Any]
) -> Any:
    """The trainer of a library, with data of its kind."""
    import torch
    import transformers

    samples, length = STEPS * options.batch, options.seq
    if options.task == "causal":
        if adapters is not None:
            import peft

            if options.method == "qlora":
                model = peft.prepare_model_for_kbit_training(
                    model, use_gradient_checkpointing=options.gradient_checkpointing
                )
            model = peft.get_peft_model(model, adapters)
        vision = getattr(model.config, "vision_config", None)
        vocabulary = model.config.get_text_config().vocab_size

        def sample(number: int) -> dict[str, Any]:
            ids = torch.randint(3, min(vocabulary, 30_000), (length,))
            made = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
            if vision is not None:
                side = vision.image_size
                tokens = (side // vision.patch_size) ** 2
                ids[:tokens] = model.config.image_token_id
                made["pixel_values"] = torch.randn(3, side, side)
                if model.config.model_type == "paligemma":
                    made["token_type_ids"] = torch.zeros_like(ids)
            return made

        return transformers.Trainer(
            model,
            transformers.TrainingArguments(**arguments),
            train_dataset=[sample(n) for n in range(samples)],
        )
    import random

    import datasets
    import tokenizers
    import trl

    words = [f"w{number}" for number in range(1000)]
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<end>", *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>"
    )

    def text(count: int) -> str:
        return " ".join(random.choices(words, k=count))

    half = length // 2
    more: dict[str, Any] = {}
    columns: dict[str, int] = {"text": length}
    if options.task == "grpo":
        columns = {"prompt": half}
        arguments |= {"num_generations": options.batch, "max_completion_length": half}

        def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
            return {
                "prompt_ids": tokenizer(prompts)["input_ids"],
                "completion_ids": [[random.randrange(2, 1002) for _ in range(half)] for _ in prompts],
                "logprobs": [[-1.0] * half for _ in prompts],
            }

        def reward(completions: list[str], **_: Any) -> list[float]:
            return [random.random() for _ in completions]

        more = {"reward_funcs": reward, "rollout_func": rollout}
    else:
        arguments["max_length"] = length
    if options.task == "dpo":
        columns = dict.fromkeys(("prompt", "chosen", "rejected"), half)
        more = {} if reference is None else {"ref_model": reference}
    name = options.task.upper()
    return getattr(trl, f"{name}Trainer")(
        model=model,
        args=getattr(trl, f"{name}Config")(**arguments),
        train_dataset=datasets.Dataset.from_dict(
            {column: [text(count) for _ in range(samples)] for column, count in columns.items()}
        ),
        processing_class=tokenizer,
        peft_config=adapters,
        **more,
    )


def table(predicted: dict[str, Any], measured: dict[str, Any]) -> str:
    """MiB, and errors in percent of the measured."""
    lines = [
        f"{'':<32}{'allocated':>10}{'measured':>10}{'error':>9}{'reserved':>11}{'measured':>10}{'error':>9}{'s':>6}"
    ]
    for name in ROWS:
        pair = [each.get(name, {"failed": "not run"}) for each in (predicted, measured)]
        failed = [each["failed"] for each in pair if "failed" in each]
        line = f"{name:<32}" + "; ".join(failed)[:90]
        if not failed:
            for kind, width in zip(PEAKS, (10, 11), strict=True):
                expected, real = (max(step[kind] for step in each["steps"][1:]) for each in pair)
                line += f"{expected / MIB:>{width},.0f}{real / MIB:>10,.0f}{expected / real - 1:>+9.2%}"
            line += f"{pair[0]['seconds']:>6.0f}"
        lines.append(line)
    return "\n".join(lines)


def sizes(found: dict[str, Any], tried: dict[str, Any]) -> str:
    """What each batch is predicted to need of the budget, and whether it ran."""
    lines = [f"{'':<44}{'budget':>7}" + f"{'batch':>7}{'needs':>9}{'':>14}" * 2]
    for name, (_, _, gib) in BUDGETS.items():
        (row,) = found[name]["found"]
        each = (row["next_needs"] - row["needs"]) / (row["next"] - row["batch"])
        line = f"{name:<44}{gib:>4} GiB"
        for batch, trial in tried[name].items():
            needs = (row["needs"] + (int(batch) - row["batch"]) * each) / gib / GIB
            failed = trial.get("failed", "")
            came = "out of memory" if "OutOfMemory" in failed else failed[:40] or "ran"
            line += f"{batch:>7}{needs:>9.2%} {came:<13}"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
