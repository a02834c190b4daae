"""A running process's answer to a request for a census. Numbers and text only."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from memtriage.model.census import GroupDetail, HolderGroup
from memtriage.model.ledger import Ledger
from memtriage.model.paths import HolderPath, in_words


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A process that gave no census, and why."""

    pid: int
    why: str


class HeldHere(msgspec.Struct, kw_only=True):
    """Storages that one place of the program keeps. Sizes in bytes.

    Attributes:
        device: `cuda:N` or `cpu`.
        holder: holder path of the largest kind of them, as printed; None in the row that stands for all
            smaller ones. Made from `holder_path` where that is given.
        holder_path: its segments.
        count: storages.
        bytes: their bytes.
        owners: bytes by owner.
        known: bytes by entry of the catalogue of known holders, as far as one keeps them.
    """

    device: str
    holder: str | None = None
    holder_path: HolderPath | None = None
    count: int
    bytes: int
    owners: dict[str, int] = msgspec.field(default_factory=dict)
    known: dict[str, int] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.holder is None and self.holder_path is not None:
            self.holder = in_words(self.holder_path)


class Answer(msgspec.Struct, kw_only=True):
    """A census of a running process, or why there is none.

    Attributes:
        pid: the process.
        rank: None when it is no rank.
        host: machine.
        argv: the program and its arguments.
        time: Unix time of the census, in seconds.
        run_id, step, microbatch: where the watch stands; None in a process that is not watched.
        doing: what the program was doing: forward, backward, optimizer, ...; None where nobody knows.
        waited_s: from the question to the census.
        paused_s: for how long the program stood still: for all of the census, or while a copy of it was made.
        took_s: how long the census took.
        ledgers: of each device in use and of the host.
        holders: largest first; they sum to all storages of tensors.
        objects, nodes: Python objects and autograd nodes that were walked.
        incomplete: what is missing of a census that should have it.
        notes: what else is not seen, or unusual.
        groups: the largest holders for who compares censuses, without `by_path`, if the question was to
            `follow`: their objects and storages are known by their addresses.
        details: type and bound of their containers, in the same order.
        refused: why there is no census; None when there is one.
    """

    pid: int
    rank: int | None = None
    host: str = ""
    argv: list[str] = msgspec.field(default_factory=list)
    time: float | None = None
    run_id: str | None = None
    step: int | None = None
    microbatch: int | None = None
    doing: str | None = None
    waited_s: float = 0.0
    paused_s: float = 0.0
    took_s: float = 0.0
    ledgers: list[Ledger] = msgspec.field(default_factory=list)
    holders: list[HeldHere] = msgspec.field(default_factory=list)
    objects: int = 0
    nodes: int = 0
    incomplete: list[str] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    groups: list[HolderGroup] = msgspec.field(default_factory=list)
    details: list[GroupDetail] = msgspec.field(default_factory=list)
    refused: str | None = None


class Question(msgspec.Struct, kw_only=True):
    """What a client sends.

    Attributes:
        within_s: how long the process may wait for an instant at which it can be looked at.
        follow: the answer is to be compared with those to later questions.
    """

    within_s: float
    follow: bool = False
