"""Starts programs that train with DeepSpeed itself, in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

_TESTS = Path(__file__).parents[1]
PROGRAM = _TESTS / "treat" / "deepspeed" / "real_program.py"
APART = Path(sys.prefix, "deepspeed")
"""Where `make test` puts DeepSpeed: installed beside them, it changes how many libraries behave."""


def installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None or (APART / "deepspeed").is_dir()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start(device: str | None, *arguments: str) -> tuple[subprocess.Popen[str], IO[str]]:
    """A process that finds DeepSpeed, and the file that it prints to; for `results`.

    Args:
        device: `cpu` or `cuda`; None for the one that DeepSpeed finds.
        arguments: of Python.
    """
    settings = {
        "PYTHONPATH": os.pathsep.join((str(APART), str(_TESTS), os.environ.get("PYTHONPATH", ""))),
        "MASTER_PORT": str(free_port()),
    }
    if device is not None:
        settings["DS_ACCELERATOR"] = device
    if device == "cpu":
        settings["CUDA_VISIBLE_DEVICES"] = ""
    printed = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `results` closes it
    command = [sys.executable, *arguments]
    environment = os.environ | settings
    return subprocess.Popen(command, stdout=printed, stderr=printed, text=True, env=environment), printed


def results(started: tuple[subprocess.Popen[str], IO[str]]) -> list[Any]:
    """What a process prints as its results, once it has ended."""
    return [json.loads(part.splitlines()[0]) for part in output(started).split("RESULT")[1:]]


def output(started: tuple[subprocess.Popen[str], IO[str]]) -> str:
    """All that a process prints, once it has ended."""
    process, printed = started
    status = process.wait(timeout=300)
    with printed:
        printed.seek(0)
        text = printed.read()
    assert status == 0, text[-3000:]
    return text


def run(device: str, *arguments: str) -> Any:
    """What the program prints.

    Args:
        device: `cpu` or `cuda`.
        arguments: of the program.
    """
    return results(start(device, str(PROGRAM), *arguments))[0]
