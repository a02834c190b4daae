"""A row of the table: what one entry's scenario showed. Texts are Markdown; figures are bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memtriage.model.units import size
from memtriage.playbook.entries import PLAYBOOK


@dataclass(slots=True)
class Row:
    """What was seen of an entry.

    Attributes:
        entry: `M1` ... `M21`.
        symptom: what goes wrong, with measured figures.
        said: memtriage's own words.
        fix: what was done about it.
        effect: before -> after, measured.
        predicted: what memtriage had said beforehand; empty where it predicts nothing.
        figures: the numbers behind the texts.
        named: memtriage's output names the entry.
        absent: why something could not be measured; empty where all was.
    """

    entry: str
    symptom: str
    said: str
    fix: str
    effect: str
    predicted: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    named: bool = False
    absent: str = ""

    @property
    def title(self) -> str:
        return PLAYBOOK[self.entry].subject


def finding_text(finding: dict[str, Any], *evidence: str) -> str:
    """A finding in memtriage's words: kind, entry and mechanism, and the evidence that has these words."""
    told = [sentence for words in evidence for sentence in finding["evidence"] if words in sentence]
    return f"`{finding['kind']}` {finding['playbook']}: " + "; ".join(
        [finding["mechanism"].rstrip("."), *told]
    )


def before_after(before: int, after: int) -> str:
    """Two sizes, and by how much the second is less."""
    return f"{size(before)} → {size(after)} ({(after - before) / before:+.0%})"


def times(before_s: float, after_s: float) -> str:
    """Two durations of a step."""
    return f"{before_s * 1e3:,.0f} → {after_s * 1e3:,.0f} ms ({(after_s - before_s) / before_s:+.0%})"
