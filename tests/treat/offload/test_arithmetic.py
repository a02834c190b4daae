"""Which kernel steps a tile, and in which thread."""

from __future__ import annotations

import threading

import pytest
import torch

from memtriage.treat.offload.arithmetic import Arithmetic
from memtriage.treat.offload.kernel import FloatRoom


def test_functions_are_called_in_a_thread_of_their_own_without_gradients() -> None:
    arithmetic = Arithmetic(FloatRoom(64, moments=False), None)
    seen: list[tuple[str, bool]] = []

    def note() -> None:
        seen.append((threading.current_thread().name, torch.is_grad_enabled()))

    def fail() -> None:
        raise ValueError("of the function")

    job = arithmetic.calling(note)
    job.wait()
    assert seen == []
    job.start()
    job.wait()
    failing = arithmetic.calling(fail)
    failing.start()
    with pytest.raises(ValueError, match="of the function"):
        failing.wait()
    arithmetic.close()
    assert seen == [("memtriage-offload-kernel_0", False)]
