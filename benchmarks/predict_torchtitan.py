"""Predict jobs of torchtitan, unchanged, next to the memory that its repository publishes.

    python benchmarks/predict_torchtitan.py [8b 70b ...]

Needs torchtitan 0.3.0 and no GPU. Reserved GiB of rank 0, as torchtitan prints it. What is published was
measured at the end of 2024 with the code of that time: without chunks in the loss, with other attention.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

PUBLISHED = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md at b5bcd76"
GIB = 2**30
_EXPANDABLE = "expandable_segments:True"  # as torchtitan's run_train.sh sets it
_START = """
import torch.distributed

if not hasattr(torch.distributed, "set_timeout"):  # newer than torch 2.13; memory does not depend on it
    torch.distributed.set_timeout = lambda timeout, group=None: None
"""
_WHOLE_LOSS = """
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import config_registry

_configured = config_registry.llama3_8b


def llama3_8b():
    config = _configured()
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    return config


config_registry.llama3_8b = llama3_8b
"""
_MAIN = """
from torchtitan.train import main

main()
"""


@dataclass(frozen=True)
class Job:
    """One prediction: a configuration of torchtitan's, with options; GiB as published, where they are."""

    name: str
    config: str
    ranks: int
    options: tuple[str, ...] = ()
    whole_loss: bool = False
    published: float | None = None


_BATCH_2 = ("--training.local_batch_size", "2")
_TP = "--parallelism.tensor_parallel_degree"
_CP = "--parallelism.context_parallel_degree"
_COPIES = "--parallelism.data_parallel_replicate_degree"
JOBS = (
    Job("8b", "llama3_8b", 8, _BATCH_2),
    Job("8b", "llama3_8b", 128, _BATCH_2),
    Job("8b", "llama3_8b", 1024, _BATCH_2),
    Job("8b-whole-loss", "llama3_8b", 8, _BATCH_2, whole_loss=True, published=82.4),
    Job("8b-whole-loss", "llama3_8b", 128, _BATCH_2, whole_loss=True, published=67.0),
    Job("70b", "llama3_70b", 256, (_TP, "8", "--training.local_batch_size", "16")),
    Job("small", "llama3_debugmodel", 2),
    Job("small-tp", "llama3_debugmodel", 8, (_TP, "2")),
    Job("small-cp", "llama3_debugmodel", 8, (_CP, "2")),
    Job("small-tp-cp", "llama3_debugmodel", 8, (_TP, "2", _CP, "2")),
    Job("small-hybrid", "llama3_debugmodel", 8, (_COPIES, "2")),
    Job("small-compiled", "llama3_debugmodel", 8, ("--compile.enable",)),
)


def prepare(folder: Path) -> None:
    """Write what the configurations read: a tokenizer, and some text instead of C4."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "word": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    assets = folder / "tests/assets"
    for name in ("tokenizer", "c4_test"):
        (assets / name).mkdir(parents=True)
    tokenizer.save(str(assets / "tokenizer/tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (assets / "tokenizer/tokenizer_config.json").write_text(json.dumps(special))
    text = json.dumps({"text": "word " * 3000, "timestamp": "", "url": ""})
    (assets / "c4_test/data.json").write_text(f"{text}\n" * 400)


def predict(job: Job, folder: Path) -> dict[str, int] | str:
    """Return the prediction as JSON, or the line that says why there is none."""
    script = folder / "train.py"
    script.write_text(_START + (_WHOLE_LOSS if job.whole_loss else "") + _MAIN)
    command = [sys.executable, "-m", "memtriage", "predict", str(script), "--gpu", "h100", "--json"]
    command += ["--world-size", str(job.ranks), "--allocator-conf", _EXPANDABLE, "--"]
    command += ["--module", "llama3", "--config", job.config, "--training.steps", "3", *job.options]
    command += ["--parallelism.spmd_backend", "partial_dtensor", "--training.disable_cuda_graphs"]
    command += ["--dataloader.dataset", "c4_test", "--hf_assets_path", "./tests/assets/tokenizer"]
    environment = {**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr.strip().splitlines()[0]


def main() -> None:
    """Print a row for each job."""
    wanted = set(sys.argv[1:])
    print(f"published: {PUBLISHED}\n")
    print(f"{'job':16} {'ranks':>5} {'allocated':>10} {'reserved':>9} {'published':>9}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder)
        for job in JOBS:
            if wanted and job.name not in wanted:
                continue
            found = predict(job, folder)
            if isinstance(found, str):
                print(f"{job.name:16} {job.ranks:5} {found[:100]}")
                continue
            allocated, reserved = (found[name] / GIB for name in ("peak_allocated", "peak_reserved"))
            published = "" if job.published is None else f"{job.published:9.1f}"
            print(f"{job.name:16} {job.ranks:5} {allocated:10.2f} {reserved:9.2f} {published}", flush=True)


if __name__ == "__main__":
    main()
