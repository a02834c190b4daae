"""Read an exception of the program without running its class's code, as `str(error)` would."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from types import MemberDescriptorType, NoneType, TracebackType, WrapperDescriptorType
from typing import Any, Final

from memtriage.observe.classes import addresses, attributes_of, bases_of, name_of, read_member
from memtriage.observe.origin import package_folder

_BASE: Final = vars(BaseException)
_PLAIN: Final = addresses(str, bytes, int, float, bool, NoneType, pathlib.PosixPath, pathlib.WindowsPath)
_CONTAINERS: Final = addresses(tuple, list)
_DEPTH: Final = 3


def traceback_of(error: BaseException) -> TracebackType | None:
    """An exception's `__traceback__`."""
    trace: TracebackType | None = _BASE["__traceback__"].__get__(error)
    return trace


def cause_of(error: BaseException) -> BaseException | None:
    """An exception's `__cause__`."""
    cause: BaseException | None = _BASE["__cause__"].__get__(error)
    return cause


def summary_of(error: BaseException) -> str:
    """The class and the message, as in the last line of a traceback but for the module."""
    name, text = name_of(type(error)), text_of(error)
    return f"{name}: {text}" if text else name


def text_of(error: BaseException) -> str:
    """Return the message of an exception.

    If the class makes its message in Python, it is the message that its arguments alone would give. Arguments
    that are objects of other classes than numbers and texts are left out.
    """
    owner = next(base for base in bases_of(type(error)) if "__str__" in attributes_of(base))
    attributes = attributes_of(owner)
    args: tuple[Any, ...] = _BASE["args"].__get__(error)
    used: list[Any] = [args]
    message = attributes["__str__"]
    if type(message) is not WrapperDescriptorType:
        message = _BASE["__str__"]
    elif owner is BaseExceptionGroup:
        used = [attributes["message"].__get__(error)]
    else:
        used += [
            read_member(each, error) for each in attributes.values() if type(each) is MemberDescriptorType
        ]
    if all(map(_is_plain, used)):
        text: str = message(error)
        return text
    return str(args[0]) if args and _is_plain(args[0]) else ""


def _is_plain(value: object, depth: int = _DEPTH) -> bool:
    kind = id(type(value))
    if kind in _CONTAINERS and depth:
        return all(_is_plain(each, depth - 1) for each in list(value))  # type: ignore[call-overload]
    return kind in _PLAIN


def remove_own_frames(error: BaseException) -> None:
    """Remove memtriage's frames from the tracebacks of an exception, and of those that it was raised from.

    Frames in which a traceback ends stay, because an error of memtriage itself must be seen. Ctrl-C is none.
    """
    own = package_folder()
    for each in _chain(error):
        kept: list[TracebackType] = []
        last: list[TracebackType] = []
        trace = traceback_of(each)
        while trace is not None:
            if not trace.tb_frame.f_code.co_filename.startswith(own):
                kept.append(trace)
                last = []
            elif kept:
                last.append(trace)
            trace = trace.tb_next
        if not issubclass(type(each), KeyboardInterrupt):
            kept += last
        for entry, following in zip(kept, [*kept[1:], None], strict=False):
            entry.tb_next = following
        _BASE["__traceback__"].__set__(each, kept[0] if kept else None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and all that its traceback shows with it."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [cause_of(each), _BASE["__context__"].__get__(each)]
            if issubclass(type(each), BaseExceptionGroup):
                waiting += vars(BaseExceptionGroup)["exceptions"].__get__(each)
