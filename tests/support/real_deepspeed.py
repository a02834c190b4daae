"""Starts the program that trains with DeepSpeed itself, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[1] / "treat" / "deepspeed" / "real_program.py"
APART = Path(sys.prefix, "deepspeed")
"""Where `make test` puts DeepSpeed: installed beside them, it changes how many libraries behave."""


def installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None or (APART / "deepspeed").is_dir()


def run(device: str, *arguments: str) -> Any:
    """What the program prints.

    Args:
        device: `cpu` or `cuda`.
        arguments: of the program.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    settings = {
        "PYTHONPATH": os.pathsep.join((str(APART), os.environ.get("PYTHONPATH", ""))),
        "DS_ACCELERATOR": device,
        "MASTER_PORT": str(port),
    }
    if device == "cpu":
        settings["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | settings,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.partition("RESULT")[2].splitlines()[0])
