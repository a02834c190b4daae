"""Texts in which the part that a message takes is marked, to compare what is found with what is expected."""

from __future__ import annotations

import re
from dataclasses import replace

from memtriage.messages.grammar.find import find
from memtriage.messages.grammar.message import Message


def message_of(said: str) -> Message:
    """Return the message that `family/form @device size=bytes fact:value -missing` stands for.

    Words of a form are joined by `_`; `?` is an unknown size, a number after `:` an `int`.
    """
    head, *words = said.split()
    family, _, form = head.partition("/")
    message = Message(family, form=form.replace("_", " "))
    fields, facts = dict(message.fields), dict(message.facts)
    for word in words:
        name, mark, value = re.fullmatch(r"(\w*)([@=:]?)(.*)", word, re.DOTALL).groups()  # type: ignore[union-attr]
        if mark == "@":
            message = replace(message, device=value)
        elif mark == "=":
            fields[name] = None if value == "?" else int(value)
        elif mark == ":":
            facts[name] = int(value) if re.fullmatch(r"-?\d+", value) else value
    missing = tuple(word[1:] for word in words if word.startswith("-"))
    return replace(message, fields=fields, facts=facts, missing=missing)


def found_and_expected(
    marked: str, message: Message | str, *, tight: bool = True
) -> tuple[list[Message], list[Message]]:
    """The messages of a text, and the one expected of it.

    Args:
        marked: the text, with «» around what the message takes of it.
        message: what is expected, its length apart; a text is read by `message_of`.
        tight: the message is read, and its length counted, without white space.
    """
    taken = marked.partition("«")[2].partition("»")[0]
    found = [each.message for each in find(marked.replace("«", "").replace("»", ""))]
    message = message_of(message) if isinstance(message, str) else message
    return found, [replace(message, length=len("".join(taken.split()) if tight else taken))]
