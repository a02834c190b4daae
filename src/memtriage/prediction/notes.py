"""What a prediction had to assume, said once each."""

from __future__ import annotations

import os
import sys
from typing import Final

import torch

from memtriage.observe.origin import package_folder

_NOT_THE_PROGRAM: Final = (os.path.dirname(torch.__file__), package_folder())
ASSUMED: Final = "values"
"""The kind of what was assumed of values that only a GPU would know."""


class Notes:
    """Collects sentences; a repeated one is said once."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], None] = {}

    def add(self, kind: str, text: str) -> None:
        """Say something, of a kind that groups what belongs together."""
        self._said.setdefault((kind, text))

    def assume(self, text: str) -> None:
        """Say what is assumed of values of the device, and where the program asked for them."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
            frame = frame.f_back
        self.add(ASSUMED, f"{text}: {frame.f_code.co_filename}:{frame.f_lineno}")

    def assumptions(self) -> list[str]:
        """What was assumed of values of the device."""
        return [text for kind, text in self._said if kind == ASSUMED]

    def all(self) -> list[str]:
        """Everything that was said, in order."""
        return [text for _, text in self._said]
