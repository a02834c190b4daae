"""One failure with all known facts, from which evidence, fixes and the open question are made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from memtriage.messages.errors import FrameState, phase_from_frames
from memtriage.messages.forms import MessageForm, form_of
from memtriage.messages.grammar.message import NOT_TORCH, SUM_ERROR, Message, OomFields, as_printed, figures
from memtriage.messages.judge import TIGHT
from memtriage.messages.shapes import Product
from memtriage.model.explanation import Label
from memtriage.model.position import TrainingPhase

_LOADS: Final = re.compile(
    r".*:_?load_(?:\w*_)?(?:weights?|models?|state_dicts?|checkpoints?|params?|parameters|pretrained\w*)|"
    r".*:(?:from_pretrained|materialize\w*)|"
    r".*/torch/(?:nn/(?!functional)|serialization\.py).*:(?!(?:forward|_?(?:wrapped_)?call_impl|__call__)$).*"
)
"""Files and functions that make, load or move weights, by the name or, in modules of torch, whatever it is.
An `__init__` or a `load` of the program's own can be anything."""
_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One failure.

    Attributes:
        message: what was said.
        labels: what it proves, then what it cannot rule out.
        phase: which part of training, where the traceback tells.
        product: the request as a product of the user's sizes; None where none fits or none were given.
        shapes: the user's sizes, by name.
        expandable: the text shows that expandable segments were on.
        weights: what an engine reported its weights to take; None where it did not.
        traits: what else the log shows (`log_file._TRAITS`).
        serving: an inference engine asked: its own settings decide, and there are no gradients.
    """

    message: Message
    labels: tuple[Label, ...]
    phase: TrainingPhase | None = None
    product: Product | None = None
    shapes: Mapping[str, int] = field(default_factory=dict)
    expandable: bool = False
    serving: bool = False
    weights: int | None = None
    traits: AbstractSet[str] = frozenset()

    @property
    def label(self) -> Label:
        return self.labels[0]

    @property
    def form(self) -> MessageForm:
        """What is known of the message's form; nothing where other figures decided."""
        form = form_of(self.message)
        return form if self.label in form.labels[:1] else MessageForm()

    @property
    def figures(self) -> OomFields:
        return figures(self.message)

    @property
    def gap(self) -> int | None:
        """Bytes to free so that the request fits, with some of the device to spare; None where unknown."""
        figures = self.figures
        if figures.requested is None or figures.free is None or figures.total is None:
            return None
        return max(0, figures.requested - figures.free + int(TIGHT * figures.total))

    @property
    def torch(self) -> bool:
        """Whether PyTorch's settings concern the program."""
        return self.message.family not in NOT_TORCH and "other runtime" not in self.traits

    @property
    def generates(self) -> bool:
        """Whether a program without an engine only runs a model: there are no gradients."""
        return (
            "generates" in self.traits
            and not self.serving
            and "trains" not in self.traits
            and self.phase not in ("backward", "optimizer")
        )

    @property
    def trains_nothing(self) -> bool:
        """Whether there is no script to watch: a model that is only run, an engine's pool, the driver."""
        return self.serving or self.generates or self.message.form in ("engine pool", "kernel module")

    def possible(self, label: Label) -> bool:
        """Whether the text proves a label or cannot rule it out."""
        return label in self.labels


def processes(message: Message) -> tuple[int | None, list[tuple[int, int]]]:
    """Return what this process has on the device, context included, and pid and bytes of each other one.

    Inside of a container its own process id differs from the host's, so that it appears as another one:
    the one that uses at least what the allocator reserved, and nearest to it.
    """
    listed = message.fields.get("processes")
    entries = listed if isinstance(listed, list) else []
    uses = [(entry.get("pid") or 0, use) for entry in entries if (use := entry.get("in_use")) is not None]
    uses.sort(key=lambda use: -use[1])
    printed, reserved = message.number("this_process"), figures(message).reserved
    if printed is None and reserved is not None:
        enough = [use for use in uses if use[1] >= reserved - SUM_ERROR]
        if own := min(enough, key=lambda use: use[1], default=None):
            return own[1], [use for use in uses if use != own]
    return printed, uses


def named_processes(uses: Sequence[tuple[int, int]]) -> str:
    """Name the largest processes by pid and size: `pid 3774074 (44.55 GiB)`.

    >>> named_processes([(7, 2 << 30), (8, 1 << 20)])
    'pid 7 (2.00 GiB), pid 8 (1024.00 KiB)'
    """
    named = [f"pid {pid} ({as_printed(use)})" for pid, use in uses[:_NAMED]]
    rest = len(uses) - len(named)
    return ", ".join([*named, f"{rest} more"] if rest else named)


def phase_of(frames: Sequence[tuple[str, str, int]]) -> TrainingPhase | None:
    """Which part of training a traceback shows; None where it does not say."""
    phase = phase_from_frames(frames, FrameState(training_begun=False))
    inner = [f"{file}:{name.rpartition('.')[2]}".replace("\\", "/") for file, name, _ in frames[:3]]
    return phase if phase != "setup" or any(map(_LOADS.fullmatch, inner)) else None
