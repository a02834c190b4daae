"""What to say of memory that is still on a device at the end of a phase, by what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

ENTRY: Final = "M19"
"""The playbook entry of every residue."""

ResidueCause = Literal["autograd graph", "garbage", "communication buffer", "program"]
"""What keeps it: `program` for all that no other cause covers."""


@dataclass(frozen=True, slots=True)
class ResidueAdvice:
    """What to say of a cause.

    Attributes:
        why: the mechanism; `{owner}` is filled in.
        fix: what to do before the phase ends.
    """

    why: str
    fix: str


ADVICE: Final[Mapping[ResidueCause, ResidueAdvice]] = {
    "autograd graph": ResidueAdvice(
        "an autograd graph outlives the phase, with what it saved for backward",
        "drop the loss and the outputs, or keep `.detach()` of them, before the phase ends",
    ),
    "garbage": ResidueAdvice(
        "reference cycles keep them until the collector runs",
        "let the phase collect (PhasePolicy(collect=True)), or break the cycle",
    ),
    "communication buffer": ResidueAdvice(
        "a communication library keeps its buffers between steps",
        "reshard or free them before the phase ends (FSDP2: `module.reshard()`)",
    ),
    "program": ResidueAdvice(
        "the program still holds them ({owner}) at the end of the phase",
        "release it before the phase ends, park it (PhasePolicy(park=...)), or register what "
        "clears it, so that the phase does (memtriage.register_holder)",
    ),
}
