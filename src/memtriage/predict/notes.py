"""What a prediction had to assume, said once each."""

from __future__ import annotations

from typing import Final

ASSUMED: Final = "values"
"""The kind of what was assumed of values that only a GPU would know."""


class Notes:
    """Collects sentences; a repeated one is said once."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], None] = {}

    def add(self, kind: str, text: str) -> None:
        """Say something, of a kind that groups what belongs together."""
        self._said.setdefault((kind, text))

    def assumptions(self) -> list[str]:
        """What was assumed of values of the device."""
        return [text for kind, text in self._said if kind == ASSUMED]

    def all(self) -> list[str]:
        """Everything that was said, in order."""
        return [text for _, text in self._said]
