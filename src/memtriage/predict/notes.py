"""What a prediction had to assume, said once each."""

from __future__ import annotations


class Notes:
    """Collects sentences; a repeated one is said once."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], None] = {}

    def add(self, kind: str, text: str) -> None:
        """Say something, of a kind that groups what belongs together."""
        self._said.setdefault((kind, text))

    def all(self) -> list[str]:
        """Everything that was said, in order."""
        return [text for _, text in self._said]
