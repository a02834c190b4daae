"""What a process has resident before it makes a tensor: measured in a fresh one that imports the same."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from memtriage.model.code_origin import is_installed
from memtriage.observe.host import kib_fields
from memtriage.observe.origin import package_folder
from memtriage.prediction.fake_cuda.stand_ins import replaced
from memtriage.prediction.fake_cuda.tensors import in_kernel
from memtriage.prediction.host.memory import Libraries

_OWN_FOLDER: Final = package_folder()
_PROBE: Final = """
import importlib, sys
trains, world = (argument == "1" for argument in sys.argv[1:])
for name in sys.stdin.read().split():
    try:
        importlib.import_module(name)
    except Exception:
        pass
import torch
if world:
    import torch.distributed
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parameter = torch.nn.Parameter(torch.randn(512, 512))
if trains:
    optimizer = torch.optim.AdamW([parameter])
    for step in range(2):
        torch.nn.functional.linear(torch.randn(64, 512), parameter).square().mean().backward()
        optimizer.step()
print(open("/proc/self/status").read())
import os
sys.stdout.flush()
os._exit(0)
"""
"""Kernels, thread pools and the code that they touch come with the first tensors: small ones are made."""
_LAUNCHER: Final = """
import os, sys
import torch.distributed.run
print(open("/proc/self/status").read())
sys.stdout.flush()
os._exit(0)
"""
_WORKER: Final = """
import os, sys, torch
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        return torch.zeros(16)
loader = DataLoader(Data(), batch_size=64, num_workers=1, multiprocessing_context="fork")
batches = iter(loader)
for batch in range(60):
    next(batches)
with open(f"/proc/{batches._workers[0].pid}/smaps_rollup") as file:
    for line in file:
        if line.startswith("Private_Dirty"):
            print("RssAnon" + line[13:])
sys.stdout.flush()
os._exit(0)
"""
"""A forked worker shares its parent's memory but for the pages that either of them has written since."""
_TIME_LIMIT_S: Final = 120
"""Seconds that imports may take on a busy machine."""


class Imports:
    """The imports that a program asks for, also of modules that the trace has imported already."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """In the block imports are noted, but those of memtriage and of kernels that stand for others."""
        original, by_name = builtins.__import__, importlib.import_module

        def imports(
            name: str, given: Any = None, local: Any = None, fromlist: Any = (), level: int = 0
        ) -> Any:
            module = original(name, given, local, fromlist, level)
            if not in_kernel() and not _asked_by_trace():
                self._note(name, (given or {}).get("__package__"), level, fromlist or ())
            return module

        def import_module(name: str, package: str | None = None) -> Any:
            module = by_name(name, package)
            if not in_kernel():
                self._note(name.lstrip("."), package, len(name) - len(name.lstrip(".")), ())
            return module

        with (
            replaced(builtins, "__import__", imports),
            replaced(importlib, "import_module", import_module),
        ):
            yield

    def _note(self, name: str, package: str | None, level: int, members: Iterable[str]) -> None:
        if _is_own(package or ""):
            return
        if level:
            name = importlib.util.resolve_name("." * level + name, package)
        for each in (name, *(f"{name}.{member}" for member in members)):
            module = sys.modules.get(each)
            if not _is_own(each) and is_installed(getattr(module, "__file__", None) or ""):
                self.names.add(each)


def _asked_by_trace() -> bool:
    """Whether the function that imports was called by memtriage, as parts of torch that it replaces are."""
    caller = sys._getframe(2).f_back
    return caller is not None and caller.f_code.co_filename.startswith(_OWN_FOLDER)


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == "memtriage"


def measure(modules: Iterable[str], trains: bool, world: int) -> Libraries | None:
    """Import modules in a fresh process and read its resident set; None where that fails.

    Args:
        trains: whether the program runs backward and an optimizer on the host.
        world: ranks of the job.
    """
    figures = _figures(_PROBE, modules, str(int(trains)), str(int(world > 1)))
    launcher = _figures(_LAUNCHER) if world > 1 else {}
    if figures is None or launcher is None:
        return None
    return Libraries(
        own=figures["RssAnon"] + figures.get("RssShmem", 0),
        shared=figures.get("RssFile", 0),
        launcher=launcher.get("RssAnon", 0),
    )


def measure_worker(forked: bool) -> int | None:
    """Bytes that a DataLoader's worker has for itself, without its data set; None where that fails."""
    figures = _figures(_WORKER if forked else _LAUNCHER)
    return None if figures is None else figures["RssAnon"]


def _figures(program: str, modules: Iterable[str] = (), *arguments: str) -> dict[str, int] | None:
    """What a program prints as `Name: N kB`, in bytes; None where it fails."""
    try:
        run = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            input="\n".join(sorted(modules)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=_TIME_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = kib_fields(run.stdout)
    return None if run.returncode or "RssAnon" not in found else found
