"""One failure with all known facts, from which evidence, fixes and the open question are made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from memtriage.messages.forms import FORMS, MessageForm
from memtriage.messages.grammar.message import NOT_TORCH, SUM_ERROR, Message, OomFields, figures
from memtriage.messages.grammar.sizes import as_printed
from memtriage.messages.shapes import Product
from memtriage.messages.training_phase import FrameState, phase_from_frames
from memtriage.model.explanation import Label
from memtriage.model.position import TrainingPhase

_LOADS: Final = re.compile(
    r"_?load_(?:\w*_)?(?:weights?|models?|state_dicts?|checkpoints?|params?|parameters|pretrained\w*)|"
    r"from_pretrained|materialize\w*"
)
"""Functions that load weights, by name. An `__init__` or a `load` of the program's own can be anything."""
_MAKES_WEIGHTS: Final = re.compile(r"/torch/(?:nn/(?!functional)|serialization\.py)")
"""Modules of torch that make, load or move weights, whatever the function is called."""
_NAMED: Final = 3
_FORWARD: Final = re.compile(r"forward|_?(?:wrapped_)?call_impl|__call__")


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
        form = FORMS.get((self.message.family, self.message.form), MessageForm())
        return form if self.label in form.labels[:1] else MessageForm()

    @property
    def figures(self) -> OomFields:
        return figures(self.message)

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


def own_process(message: Message) -> int | None:
    """Return what this process has on the device, context and libraries included.

    Inside of a container its own process id differs from the host's, so that it appears as another one:
    the one that uses at least what the allocator reserved, and nearest to it.
    """
    printed = message.number("this_process")
    own = _own(message)
    return own[1] if printed is None and own is not None else printed


def other_processes(message: Message) -> list[tuple[int, int]]:
    """Return the pid and the bytes on the device of each other process that the message lists."""
    own = None if message.number("this_process") is not None else _own(message)
    return [use for use in _uses(message) if use != own]


def _own(message: Message) -> tuple[int, int] | None:
    reserved = figures(message).reserved
    enough = [] if reserved is None else [use for use in _uses(message) if use[1] >= reserved - SUM_ERROR]
    return min(enough, key=lambda use: use[1], default=None)


def _uses(message: Message) -> list[tuple[int, int]]:
    """Return the pid and the bytes of the listed processes, the largest first."""
    listed = message.fields.get("processes")
    entries = listed if isinstance(listed, list) else []
    uses = [(entry.get("pid") or 0, use) for entry in entries if (use := entry.get("in_use")) is not None]
    return sorted(uses, key=lambda use: -use[1])


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
    if phase == "setup" and not any(_loads(file, name) for file, name, _ in frames[:3]):
        return None
    return phase


def _loads(file: str, name: str) -> bool:
    function = name.rpartition(".")[2]
    if _LOADS.fullmatch(function):
        return True
    return _MAKES_WEIGHTS.search(file.replace("\\", "/")) is not None and not _FORWARD.fullmatch(function)
