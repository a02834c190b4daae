"""A limit on memory that a job sets itself: a cap on the GPU's allocator, or on the address space."""

from __future__ import annotations

import argparse
import json
import os
import resource
from pathlib import Path

import torch

MIB = 1 << 20
GIB = 1 << 30


def limit(device: str, nbytes: int) -> None:
    """Allows this process so many bytes of the GPU, or so many more than it has mapped on the host.

    The host's libraries get their own memory first, by a small product. PLAYBOOK_UNLIMITED=1 lifts all.
    """
    if os.environ.get("PLAYBOOK_UNLIMITED"):
        return
    if device == "cuda":
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(nbytes / total)
        return
    torch.ones(64, 64) @ torch.ones(64, 64)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (mapped + nbytes, hard))


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every job has."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--cured", action="store_true", help="with the playbook's fix")
    return made


def say(**figures: object) -> None:
    """Prints figures as the job's JSON line."""
    print(json.dumps(figures), flush=True)
