"""Whether an error means that memory ran out, and the figures of its message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from memtriage.messages.grammar.message import Message, OomFields, figures

_MEMORY_CLASSES: Final = frozenset({"OutOfMemoryError", "MemoryError", "_ArrayMemoryError"})

_ORDINARY_CLASSES: Final = frozenset(
    {
        "ValueError",
        "TypeError",
        "LookupError",
        "AttributeError",
        "AssertionError",
        "ImportError",
        "NameError",
        "SyntaxError",
        "Warning",
        "KeyboardInterrupt",
        "SystemExit",
    }
)
"""Classes whose text is the program's own talk: no runtime reports a failed allocation with them. (An
ImportError can say "cannot allocate memory in static TLS block", which is not about memory running out.)"""


def is_out_of_memory(kind_names: Sequence[str], text: str) -> bool:
    """Whether an exception means that memory ran out, on a device or on the host.

    SIGKILL of a DataLoader worker is not called that: it alone proves nothing. Nor is a kernel that asks for
    more of a GPU's on-chip shared memory than there is (Triton's `OutOfResources`).

    Args:
        kind_names: names of the exception's class and of its bases, with or without their modules.
        text: its message.
    """
    names = {name.rpartition(".")[2] for name in kind_names}
    if names & _MEMORY_CLASSES:
        return True
    return not names & _ORDINARY_CLASSES and bool(_failures(text))


def read_message(text: str) -> OomFields:
    """Read the figures of an error's message; what it does not have is None.

    Args:
        text: the message, with the name of its class in front where that is known (`MemoryError` has no
            text of its own).
    """
    failures = _failures(text)
    return figures(failures[0]) if failures else OomFields()


def _failures(text: str) -> list[Message]:
    """Return what the text says of memory that ran out."""
    # Imported late: the grammar is compiled in some 40 ms, which a program that lives need not pay.
    from memtriage.messages.grammar.find import find

    return [hit.message for hit in find(text) if hit.message.ran_out]
