"""The child's side: protect the files, call the function, send back what it returned."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

import msgspec

from memtriage.prediction.sandbox import syscalls
from memtriage.prediction.sandbox.call import ChildCall, Progress, Refused, Returned
from memtriage.prediction.sandbox.overlay import high_descriptor
from memtriage.prediction.sandbox.protection import protect

_send_to: int | None = None


def main() -> None:
    """Serve one call; the arguments are descriptors: to answer at, and to read a `ChildCall` from as JSON."""
    global _send_to
    descriptor, request = map(int, sys.argv[1:])
    _send_to = high_descriptor(descriptor)
    sys.argv[:] = sys.argv[:1]
    if sys.platform == "linux":
        syscalls.die_with_parent(signal.SIGTERM)
    with open(request, "rb") as file:
        asked = msgspec.json.decode(file.read(), type=ChildCall)
    protection = protect(asked.scratch, asked.wanted, asked.network, asked.levels)
    directory = os.getcwd()
    module, _, name = asked.function.partition(":")
    answer: Refused | Returned
    try:
        result = getattr(importlib.import_module(module), name)(**asked.arguments)
    except ValueError as error:
        answer = Refused(" ".join(str(error).split()))
    else:
        result.notes.extend([*protection.notes, *filter(None, [protection.changes().line(directory)])])
        answer = Returned(msgspec.Raw(msgspec.json.encode(result)))
    sys.stdout.flush()
    sys.stderr.flush()
    _send(answer)
    # At once: threads and exit handlers that the program has left cannot keep the process.
    os._exit(0)


def report_progress(text: str) -> None:
    """Send the caller a line about how far the trace is; nothing happens outside a child."""
    if _send_to is not None:
        _send(Progress(text))


def _send(message: Any) -> None:
    assert _send_to is not None
    line = msgspec.json.encode(message) + b"\n"
    while line:
        line = line[os.write(_send_to, line) :]
