"""Texts in which the part that a message takes is marked, to compare what is found with what is expected."""

from __future__ import annotations

from dataclasses import replace

from memtriage.messages.grammar.find import find
from memtriage.messages.grammar.message import Message


def found_and_expected(
    marked: str, message: Message, *, tight: bool = True
) -> tuple[list[Message], list[Message]]:
    """The messages of a text, and the one expected of it.

    Args:
        marked: the text, with «» around what the message takes of it.
        message: what is expected, its length apart.
        tight: the message is read, and its length counted, without white space.
    """
    taken = marked.partition("«")[2].partition("»")[0]
    found = [each.message for each in find(marked.replace("«", "").replace("»", ""))]
    return found, [replace(message, length=len("".join(taken.split()) if tight else taken))]
