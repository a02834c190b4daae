"""What a prediction had to assume, said once each."""

from __future__ import annotations

import os
import sys
from typing import Final

import torch

from memtriage.observe.origin import package_folder

_NOT_THE_PROGRAM: Final = (os.path.dirname(torch.__file__), package_folder())


class Notes:
    """Collects sentences; a repeated one is said once."""

    def __init__(self) -> None:
        self._said: dict[str, bool] = {}  # whether it is an assumption about values

    def add(self, text: str) -> None:
        """Say something."""
        self._said.setdefault(text, False)

    def assume(self, text: str) -> None:
        """Say what is assumed of values of the device, and where the program asked for them."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
            frame = frame.f_back
        self._said.setdefault(f"{text}: {frame.f_code.co_filename}:{frame.f_lineno}", True)

    def assumptions(self) -> list[str]:
        """What was assumed of values of the device."""
        return [text for text, is_assumed in self._said.items() if is_assumed]

    def all(self) -> list[str]:
        """Everything that was said, in order."""
        return list(self._said)
