"""Small versions of the files that the documentation names: a script, a log, recordings, runs."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from memtriage.model.marks import Mark
from memtriage.store.bundle import write_bundle
from memtriage.store.layout import RankIdentity, record_path
from memtriage.store.reader import read_run
from memtriage.store.records import End, Start
from memtriage.store.writer import RankWriter
from support.documents import ROOT

SNAPSHOTS: Final = ROOT / "tests" / "data" / "snapshots"
STEPS: Final = 6

TRAIN: Final = '''\
"""Trains a little, on a GPU where there is one. Takes every argument."""

import torch
from torch import nn

STEPS = 6


def build(device, micro_batch=8):
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        loss = model(torch.randn(micro_batch, 64, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return model, optimizer, step


def main():
    _, _, step = build("cuda" if torch.cuda.is_available() else "cpu")
    for number in range(STEPS):
        print(f"step {number} loss {step():.4f}")


if __name__ == "__main__":
    main()
'''

MIXTURE: Final = """\
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            result = result.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return result


def build("""

TRIALS: Final = """\
[trials]
script = "train.py"
repeats = 1
warmup = 1

[[variant]]
name = "plain"

[[variant]]
name = "larger"
args = ["--batch", "16"]
"""

LLAMA: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}

_OUT_OF_MEMORY: Final = (
    "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.41 GiB. GPU 5 has a total "
    "capacity of 79.18 GiB of which 1.08 GiB is free. Including non-PyTorch memory, this process has "
    "78.09 GiB memory in use. Of the allocated memory 60.31 GiB is allocated by PyTorch, and 16.93 GiB is "
    "reserved by PyTorch but unallocated."
)
_TIMEOUT: Final = (
    "[rank{rank}]:[E1122 03:00:00.000 ProcessGroupNCCL.cpp:685] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE) ran for 600021 milliseconds before timing out."
)
_LAUNCHER: Final = (
    "W1122 03:00:01.000 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 4122 closing "
    "signal SIGTERM"
)
LOG: Final = "\n".join(
    (
        *(f"step {step} loss {7.3 - step / 1000:.4f}" for step in range(2403)),
        _OUT_OF_MEMORY,
        *(_TIMEOUT.format(rank=rank) for rank in (0, 1, 2, 3, 4, 6, 7)),
        _LAUNCHER,
        "",
    )
)
"""The log of eight ranks: one runs out of memory, the others time out."""

KUBECTL: Final = """\
#!/bin/sh
# A stand-in for kubectl: `kubectl logs POD` prints the pod's log.
test "$1" = logs && cat train.log
"""


def environment(folder: Path) -> dict[str, str]:
    """The environment of a command: this interpreter's programs first, stand-ins in `bin` before them."""
    path = os.pathsep.join((str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    own = {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "TERM": "dumb"}
    unwanted = ("MEMTRIAGE", "PYTEST", "COLUMNS")
    return {key: value for key, value in os.environ.items() if not key.startswith(unwanted)} | own


class Files:
    """Makes files, each once, and copies them to where a command needs them.

    Args:
        store: an empty folder, in which the files are kept for the next command.
    """

    def __init__(self, store: Path) -> None:
        self._store = store

    def bring(self, folder: Path, text: str) -> None:
        """Copy into a folder every file that a text names, and the files that these need."""
        for name in ("examples", "benchmarks", "cases"):
            (folder / name).symlink_to(ROOT / name)
        words = [
            word
            for word in (*MAKERS, *NEEDS)
            if re.search(rf"(?<![\w./-]){re.escape(word)}(?![\w-]|\.\w)", text)
        ]
        for name in dict.fromkeys(
            more for word in words for more in (word, *NEEDS.get(word, ())) if more in MAKERS
        ):
            self._bring(folder, name)

    def _bring(self, folder: Path, name: str) -> None:
        kept = self._store / name
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            MAKERS[name](kept)
        copy = folder / name
        copy.parent.mkdir(exist_ok=True)
        if kept.is_dir():
            shutil.copytree(kept, copy)
        else:
            shutil.copy(kept, copy)


def _text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content, encoding="utf-8") and None


def _program(path: Path) -> None:
    path.write_text(KUBECTL, encoding="utf-8")
    path.chmod(0o755)


def _recording(path: Path) -> None:
    shutil.copy(SNAPSHOTS / "loss_list.pickle.gz", path)


def _unpacked(name: str) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(gzip.decompress((SNAPSHOTS / name).read_bytes())) and None


def _run(path: Path) -> None:
    """Record a real run."""
    script = path.parent / "train.py"
    script.write_text(TRAIN, encoding="utf-8")
    command = [sys.executable, "-m", "memtriage", "run", "-o", str(path), str(script)]
    subprocess.run(command, check=True, capture_output=True, env=environment(path.parent))


def _gpu_run(path: Path, rank: int | None = None, world_size: int = 1) -> None:
    """Write the record of a run on a GPU without one."""
    with RankWriter(record_path(path, RankIdentity("job", 0, rank, world_size, rank or 0))) as writer:
        writer.write(
            "start", Start(run_id="job", rank=rank, world_size=world_size, time=1.0, argv=["train.py"])
        )
        for step in range(1, STEPS + 1):
            for name, before in (("backward", 1), ("step", 0)):
                mark = Mark(
                    name=name,
                    step=step - before,
                    microbatch=1,
                    rank=rank,
                    time_s=float(step),
                    device="cuda:0",
                    allocated=70 << 20,
                    reserved=80 << 20,
                )
                writer.write("mark", mark)
        writer.write("end", End(verdict="clean", steps=STEPS, time_s=float(STEPS)))


def _bundle(path: Path) -> None:
    _gpu_run(path.parent / "recorded")
    write_bundle(read_run([path.parent / "recorded"]), path)


MAKERS: Final[Mapping[str, Callable[[Path], None]]] = {
    "train.py": _text(TRAIN),
    "package/train.py": _text(TRAIN),
    "train.log": _text(LOG),
    "config.json": _text(json.dumps(LLAMA)),
    "train_mixture.py": _text(
        TRAIN.replace("def build(", MIXTURE).replace(
            "model = nn.Sequential(", "model = nn.Sequential(Mixture(), "
        )
    ),
    "routing.json": _text(json.dumps([[3, 1, 2, 2]])),
    "trials.toml": _text(TRIALS),
    "run.pickle.gz": _recording,
    "loss_list.pickle.gz": _recording,
    "run.pickle": _unpacked("loss_list.pickle.gz"),
    "before.pickle": _unpacked("loss_list.pickle.gz"),
    "after.pickle": _unpacked("healthy.pickle.gz"),
    "memtriage-run": _run,
    "run.jsonl.gz": _bundle,
    "runs": _gpu_run,
    "node0": lambda path: _gpu_run(path, 0, 2),
    "node1": lambda path: _gpu_run(path, 1, 2),
    "bin/kubectl": _program,
}
"""How each file is made, by its name in the documentation."""

NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "trials.toml": ("train.py",),
    "kubectl": ("bin/kubectl", "train.log"),
    "package.train": ("package/train.py",),
}
"""Further files that words of a command line need."""
