"""Host memory as predicted by `memtriage predict --host`, and as measured: loading, saving and workers.

    python benchmarks/predict_host.py [--only WORD] [--keep DIR]

Each program is predicted first. Then it runs in a control group of its own (cgroup v2 or v1; root or a
delegated group is needed), whose `memory.stat` is read every 4 ms. Of a node the anonymous and shared memory
of the group counts, and the mapped pages of files of the process that has most; page cache that no process
has mapped does not count. Of a process its own high-water mark (`VmHWM`) counts; of several the highest. A
prediction of a process includes its workers, so that there is nothing to compare it with where it has some.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

EVERY_S = 0.004
MIB = 1 << 20

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32000, 2048)
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(24))
"""
LLAMA = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
"""
RANKS = """
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)])
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
model.to_empty(device="cpu")
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(0.5)
"""
END = """
dist.barrier()
dist.destroy_process_group()
"""
PREPARE = f"""{NET}{LLAMA}
from safetensors.torch import save_file

model = Net()
torch.save(model.state_dict(), "net.pt")
save_file(model.state_dict(), "net.safetensors")
LlamaForCausalLM(LlamaConfig(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=16,
    num_key_value_heads=16, vocab_size=32000, tie_word_embeddings=False,
)).save_pretrained("llama")
"""


@dataclass(frozen=True)
class Scenario:
    """A program, and how many ranks of it run on the node."""

    name: str
    program: str
    ranks: int = 1


SCENARIOS = (
    Scenario(
        "torch.load, load_state_dict",
        f'{NET}\nmodel = Net()\nmodel.load_state_dict(torch.load("net.pt"))\n',
    ),
    Scenario(
        "torch.load(mmap=True), assign, bf16",
        f"""{NET}
with torch.device("meta"):
    model = Net()
model.load_state_dict(torch.load("net.pt", mmap=True), assign=True)
model.to(torch.bfloat16)
""",
    ),
    Scenario(
        "safetensors, copied to bf16",
        f"""{NET}
from safetensors.torch import load_file

model = Net().to(torch.bfloat16)
model.load_state_dict(load_file("net.safetensors"))
torch.save(model.state_dict(), "bf16.pt")
""",
    ),
    Scenario(
        "from_pretrained bf16, save_pretrained",
        f"""{LLAMA}
model = AutoModelForCausalLM.from_pretrained("llama", dtype=torch.bfloat16)
model.save_pretrained("llama-bf16")
""",
    ),
    Scenario(
        "AdamW on the host, saved to BytesIO",
        """
import io
import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(16, 4096)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
buffer = io.BytesIO()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
""",
    ),
    Scenario(
        "OffloadedAdamW",
        """
import torch
from torch import nn
import memtriage

model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]).bfloat16()
optimizer = memtriage.OffloadedAdamW(model.parameters(), gradients="host", pin_memory=False)
for step in range(3):
    model(torch.randn(16, 4096).bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    Scenario(
        "3 workers, a list of 2 M strings",
        """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Words(Dataset):
    def __init__(self):
        self.words = [f"word number {index} of a list that is long enough" for index in range(2_000_000)]
    def __len__(self):
        return 200_000
    def __getitem__(self, index):
        return torch.full((256,), float(sum(len(self.words[index * 10 + each]) for each in range(10))))

def main():
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in DataLoader(Words(), batch_size=2000, num_workers=3, shuffle=True):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    main()
""",
    ),
    Scenario(
        "FSDP2, full state dict on rank 0",
        f"""{RANKS}
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
full = get_model_state_dict(model, options=options)
if dist.get_rank() == 0:
    torch.save(full, "full.pt")
{END}""",
        ranks=8,
    ),
    Scenario(
        "FSDP2, DCP saved and loaded",
        f"""{RANKS}
state = {{"model": get_model_state_dict(model)}}
dcp.save(state, checkpoint_id="dcp")
dcp.load(state, checkpoint_id="dcp")
{END}""",
        ranks=4,
    ),
    Scenario(
        "FSDP2, DCP saved asynchronously",
        f"""{RANKS}
optimizer = torch.optim.AdamW(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
optimizer.step()
optimizer.zero_grad()
other = dist.new_group(backend="gloo")
weights, states = get_state_dict(model, optimizer)
saving = dcp.async_save({{"model": weights, "optimizer": states}}, checkpoint_id="async", process_group=other)
saving.result()
{END}""",
        ranks=4,
    ),
)


class Group:
    """A control group of memory below the one of this process."""

    def __init__(self) -> None:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        places = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
        if "memory" in places:
            root, self._names = Path("/sys/fs/cgroup/memory"), ("total_rss", "total_shmem")
            self.folder = root / places["memory"].lstrip("/") / f"predict_host_{os.getpid()}"
        else:
            self._names = ("anon", "shmem")
            self.folder = Path("/sys/fs/cgroup") / places[""].lstrip("/") / f"predict_host_{os.getpid()}"
        self.folder.mkdir()

    def enter(self) -> None:
        """This process joins the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def now(self) -> tuple[int, dict[str, int]]:
        """Bytes that the node has resident, and the high-water mark of each process."""
        lines = (line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        figures = {name: int(value) for name, value in lines}
        files, highest = 0, {}
        for number in (self.folder / "cgroup.procs").read_text().split():
            try:
                status = Path(f"/proc/{number}/status").read_text()
            except OSError:
                continue
            found = {
                name: int(value.split()[0]) << 10
                for name, _, value in (line.partition(":") for line in status.splitlines())
                if name in ("VmHWM", "RssFile")
            }
            files = max(files, found.get("RssFile", 0))
            highest[number] = found.get("VmHWM", 0)
        return sum(figures.get(name, 0) for name in self._names) + files, highest


def predicted(scenario: Scenario, folder: Path) -> dict[str, dict[str, int]]:
    """`host` and `host_node` of the prediction."""
    ranks = ["--world-size", str(scenario.ranks)] if scenario.ranks > 1 else []
    command = ["predict", "--host", "--gpu", "none", "--json", *ranks, "program.py"]
    run = subprocess.run(
        [sys.executable, "-m", "memtriage", *command], cwd=folder, check=True, stdout=subprocess.PIPE
    )
    return json.loads(run.stdout)


def measured(scenario: Scenario, folder: Path, group: Group) -> tuple[int, int]:
    """The highest high-water mark of a process, and the most that the node had resident."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(scenario.ranks)]
    run = subprocess.Popen(
        [sys.executable, *(launch if scenario.ranks > 1 else []), "program.py"],
        cwd=folder,
        preexec_fn=group.enter,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    process = node = 0
    while run.poll() is None:
        resident, highest = group.now()
        node = max(node, resident)
        process = max([process, *highest.values()])
        time.sleep(EVERY_S)
    if run.returncode:
        raise SystemExit(run.communicate()[1].decode(errors="replace"))
    return process, node


def _cells(predicted: int, measured: int | None) -> str:
    if measured is None:
        return " " * 26
    return f"{predicted / MIB:>9,.0f}{measured / MIB:>9,.0f}{predicted / measured - 1:>+8.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="scenarios with this in their names")
    parser.add_argument("--keep", type=Path, help="work in this folder and keep it")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        subprocess.run([sys.executable, "-c", PREPARE], cwd=folder, check=True)
        group = Group()
        try:
            print(f"{'MiB':<40}{'ranks':>6}{'process':>9}{'measured':>9}{'':>8}{'node':>9}{'measured':>9}")
            for scenario in SCENARIOS:
                if given.only in scenario.name:
                    (folder / "program.py").write_text(scenario.program)
                    figures = predicted(scenario, folder)
                    process, node = measured(scenario, folder, group)
                    cells = _cells(figures["host"]["peak"], None if "workers" in scenario.name else process)
                    cells += _cells(figures["host_node"]["peak"], node)
                    print(f"{scenario.name:<40}{scenario.ranks:>6}{cells}", flush=True)
        finally:
            group.folder.rmdir()


if __name__ == "__main__":
    main()
