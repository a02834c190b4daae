"""What reports of a snapshot call things: owners with their meaning and color, pools and streams."""

from __future__ import annotations

from typing import Final, NamedTuple

from memtriage.model.blocks import DEFAULT_POOL
from memtriage.model.findings import GROWING, SEVERE, Finding
from memtriage.model.recording import DeviceRecording
from memtriage.model.units import UNKNOWN, count, rate, size
from memtriage.report.findings import FindingFact, FindingGroup
from memtriage.report.labels import KINDS
from memtriage.report.styles import Severity


class OwnerLook(NamedTuple):
    """What an owner stands for, in a few words, and the name of its color in `assets/page.css`."""

    color: str
    meaning: str


OWNER_LOOKS: Final[dict[str, OwnerLook]] = {
    "before the recording": OwnerLook("hue-past", "older than the first recorded event"),
    "parameter": OwnerLook("hue-1", "weights of the model"),
    "optimizer state": OwnerLook("hue-5", "what the optimizer keeps from step to step"),
    "cuBLAS workspace": OwnerLook("hue-11", "scratch space of matrix products"),
    "communication buffer": OwnerLook("hue-10", "buffers of collective communication"),
    "variable": OwnerLook("hue-9", "something the program's own code holds; its frames show only where"),
    "gradient": OwnerLook("hue-3", "gradients of parameters"),
    "autograd context": OwnerLook("hue-6", "kept by a node of the autograd graph from forward on"),
    "saved for backward": OwnerLook("hue-2", "made in forward and freed by backward"),
    "c++ only": OwnerLook("hue-other", "allocated without any Python frame"),
    "forward temporary": OwnerLook("hue-4", "made and freed within forward"),
    "backward temporary": OwnerLook("hue-8", "made and freed within backward"),
    "optimizer temporary": OwnerLook("hue-7", "made and freed within the optimizer's step"),
}
"""Owners as a stacked chart puts them: what stays is below what comes and goes."""

PRIVATE_FREE: Final = "free segments of private pools: not released while a CUDA graph or MemPool uses them"
"""What the free segments of private pools are. A snapshot does not say whether the graph still lives."""


def amount(finding: Finding) -> str:
    """Return the figure that a finding is known by."""
    if finding.kind in GROWING and finding.bytes_per_step is not None:
        return rate(finding.bytes_per_step, "step")
    asked = " asked for" if finding.kind == "out_of_memory" else ""
    return f"{size(finding.bytes)}{asked}"


def facts(finding: Finding, dot: str) -> list[FindingFact]:
    """Return what is known of a finding; a snapshot has no objects, and so no holder to miss."""
    return [fact for fact in FindingGroup([finding], None).facts(dot) if fact.values != [UNKNOWN]]


def level(finding: Finding) -> Severity:
    """Return how much a finding matters."""
    return "bad" if finding.kind in SEVERE else "warn"


def verdict(device: DeviceRecording) -> tuple[Severity, str, str]:
    """Return the verdict on a device: how much it matters, its word, and the sentence after it."""
    events = count(len(device.events), "event")
    if device.verdict == "not_judged":
        steps = count(device.steps.count, "step") if device.steps.count else "no steps"
        return "warn", "not judged", f"growth can't be judged from {events} with {steps}"
    if not device.findings:
        steps = f" and {count(device.steps.count, 'step')}" if device.steps.count else ""
        return (
            "good",
            "clean",
            f"nothing wrong found in {events}{steps}",
        )
    first, *rest = device.findings
    at = f" at {first.allocated_at}" if first.allocated_at else ""
    more = f", and {count(len(rest), 'more finding')}" if rest else ""
    return level(first), KINDS[first.kind], f"{amount(first)}{at}{more}"


def where(pool: tuple[int, int], stream: int) -> str:
    """Return a pool and a stream in words.

    >>> where((0, 0), 0), where((0, 3), 94)
    ('default pool, default stream', 'private pool 0.3, stream 0x5e')
    """
    pool_words = "default pool" if pool == DEFAULT_POOL else f"private pool {pool[0]}.{pool[1]}"
    return f"{pool_words}, {'default stream' if stream == 0 else f'stream {stream:#x}'}"
