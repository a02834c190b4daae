"""Cases of failures with the figures that a test names, for what is made from a case."""

from __future__ import annotations

from typing import Final

from memtriage.messages.case import Case
from memtriage.messages.grammar.message import Message
from memtriage.model.explanation import Field, Label

MIB: Final = 1024**2
GIB: Final = 1024**3


def device_case(label: Label, family: str = "cuda-v2", **fields: Field) -> Case:
    """A failed request for 2 GiB on a device of 80 GiB, where the fields do not say else."""
    figures: dict[str, Field] = {"requested": 2 * GIB, "total": 80 * GIB, **fields}
    known = {name: size for name, size in figures.items() if size is not None}
    missing = tuple(name for name, size in figures.items() if size is None and name == "reserved_unallocated")
    return Case(Message(family, fields=known, device="cuda:0", missing=missing), (label,))


def text_case(label: Label, family: str, form: str = "", **facts: str | int) -> Case:
    """A message of the host without any figure."""
    return Case(Message(family, form=form, facts=facts, device="host"), (label,))


def sizes_case(
    label: Label, family: str, form: str = "", device: str | None = "host", **fields: Field
) -> Case:
    """A message with figures of its own."""
    return Case(Message(family, form=form, fields=fields, device=device), (label,))


def failed(form: str = "failed", device: str | None = None, **fields: int) -> Message:
    """A failed allocation of some runtime."""
    return Message("allocation", form=form, fields=fields, device=device)
