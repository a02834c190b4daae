"""Messages and tracebacks of the program's exceptions, without running their code."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from memtriage.observe.exceptions import remove_own_frames, summary_of, text_of
from memtriage.observe.origin import package_folder


def raised(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "call",
    [
        lambda: {}["missing"],
        lambda: os.stat("/does/not/exist"),
        lambda: os.stat(Path("/does/not/exist")),
        lambda: os.rename("/does/not/exist", "/neither"),
        lambda: b"\xff".decode(),
        lambda: compile("x = = 1", "file.py", "exec"),
        lambda: __import__("not_a_module"),
        lambda: [].none,  # type: ignore[attr-defined]
        lambda: exec("raise ExceptionGroup('several', [ValueError(1)])"),
        lambda: exec("raise ValueError"),
        lambda: exec("raise ValueError(1, ['two', (3.0, None)])"),
    ],
)
def test_what_the_interpreter_prints(call: Callable[[], object]) -> None:
    error = raised(call)
    assert text_of(error) == str(error)
    last = traceback.format_exception_only(error)[-1].rstrip("\n")
    assert type(error) is SyntaxError or summary_of(error) == last


class Refusing:
    def __repr__(self) -> str:
        raise SystemExit

    __str__ = __repr__


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise SystemExit


class Own(ValueError):
    def __str__(self) -> str:
        raise SystemExit


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Own("given"), "Own: given"),
        (Own("given", 2), "Own: ('given', 2)"),
        (Own(), "Own"),
        (ValueError("given", Refusing()), "ValueError: given"),
        (ValueError([[Refusing()]]), "ValueError"),
        (ValueError(Text("given")), "ValueError"),
        (OSError(2, "no such file", Refusing()), "FileNotFoundError: 2"),
    ],
)
def test_no_code_of_the_program_runs(error: BaseException, expected: str) -> None:
    assert summary_of(error) == expected


def own(source: str, **names: object) -> Callable[[], object]:
    """Make the function `work` as if it were the watch's own code."""
    exec(compile(source, os.path.join(package_folder(), "made.py"), "exec"), names)
    work = names["work"]
    assert callable(work)
    return work


def files(error: BaseException) -> list[str]:
    return [os.path.basename(entry.filename) for entry in traceback.extract_tb(error.__traceback__)]


def fails() -> None:
    raise ValueError


def test_frames_of_the_watch_go_from_the_whole_chain() -> None:
    def handles() -> None:
        try:
            own("def work(): fails()", fails=fails)()
        finally:
            own("def work(): interrupt()", interrupt=lambda: exec("raise KeyboardInterrupt"))()

    error = raised(own("def work(): handles()", handles=handles))
    remove_own_frames(error)
    here = os.path.basename(__file__)
    assert files(error) == [here, here, here, "<string>"]
    assert error.__context__ is not None and files(error.__context__) == [here, here]


def test_ctrl_c_in_the_watchs_work_ends_in_the_program() -> None:
    error = raised(own("def work(): raise KeyboardInterrupt"))
    remove_own_frames(error)
    assert files(error) == [os.path.basename(__file__)]


def test_an_error_of_memtriage_shows_where_it_was_raised() -> None:
    error = raised(lambda: summary_of(None))  # type: ignore[arg-type]
    remove_own_frames(error)
    assert files(error)[-1] == "exceptions.py"
