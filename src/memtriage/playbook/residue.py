"""What to say about memory that is still on a device at the end of a phase, by owner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from memtriage.playbook.mechanisms import MechanismText

ENTRY: Final = "M19"
"""The playbook entry of every residue."""

ResidueCause = Literal["autograd graph", "garbage", "communication buffer", "program"]
"""What keeps it: `program` for all that no other cause covers."""


ADVICE: Final[Mapping[ResidueCause, MechanismText]] = {
    "autograd graph": MechanismText(
        "an autograd graph outlives the phase, with what it saved for backward",
        "drop the loss and the outputs, or keep `.detach()` of them, before the phase ends",
    ),
    "garbage": MechanismText(
        "reference cycles keep them until the collector runs",
        "let the phase collect (PhasePolicy(collect=True)), or break the cycle",
    ),
    "communication buffer": MechanismText(
        "a communication library keeps its buffers between steps",
        "reshard or free them before the phase ends (FSDP2: `module.reshard()`)",
    ),
    "program": MechanismText(
        "the program still holds them ({owner}) at the end of the phase",
        "release it before the phase ends, park it (PhasePolicy(park=...)), or register what "
        "clears it, so that the phase does (memtriage.register_holder)",
    ),
}
