"""Ask running processes for a census: those that listen or, from Python 3.14 on, any process of the user."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import msgspec
import psutil

from memtriage.model.asked import Answer, Question, Unanswered
from memtriage.model.units import MIB, duration
from memtriage.session.remote.listen import peer, read_line
from memtriage.session.remote.socket_path import socket_of

_AT_ONCE: Final = 32
_LONGEST_ANSWER: Final = 256 * MIB
_WAITING_SHARE: Final = 0.5
"""Part of the time that the process may wait for a suitable instant; the rest is for the census."""


class AskError(Exception):
    """A process returned no census. The text is one line for the user."""


def listening(pid: int) -> list[int]:
    """Return the process if it listens, and those of its descendants that do (the ranks below a launcher).

    Raises:
        AskError: there is no such process, or it belongs to another user.
    """
    try:
        process = psutil.Process(pid)
        family = [pid, *(child.pid for child in process.children(recursive=True))]
        owner = process.uids().effective
    except (psutil.NoSuchProcess, ValueError):
        raise AskError(f"there is no process {pid}") from None
    except psutil.AccessDenied:
        owner = -1
    if os.geteuid() not in (owner, 0):
        raise AskError(f"process {pid} belongs to another user; only its own user, and root, may ask it")
    return [member for member in family if socket_of(member) is not None]


def ask_all(
    pids: Sequence[int], timeout_s: float, ask_one: Callable[[int, float], Answer] | None = None
) -> tuple[list[Answer], list[Unanswered]]:
    """Ask several processes at the same time.

    Args:
        pids: the processes.
        timeout_s: seconds within which each must answer.
        ask_one: how one is asked; at its socket by default.
    """
    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, max(1, len(pids)))) as pool:
        results = list(pool.map(lambda pid: _outcome(pid, timeout_s, ask_one or ask), pids))
    answers = [result for result in results if isinstance(result, Answer)]
    answers.sort(key=lambda answer: (answer.rank or 0, answer.pid))
    return answers, [result for result in results if isinstance(result, Unanswered)]


def _outcome(pid: int, timeout_s: float, ask_one: Callable[[int, float], Answer]) -> Answer | Unanswered:
    try:
        answer = ask_one(pid, timeout_s)
    except AskError as error:
        return Unanswered(pid, str(error))
    if answer.refused is not None:
        return Unanswered(pid, f"process {pid} gave no census: {answer.refused}")
    answer.pid = pid  # in a container it may have another number
    return answer


def ask(pid: int, timeout_s: float, follow: bool = False) -> Answer:
    """Ask one process at its socket.

    Args:
        pid: the process.
        timeout_s: seconds within which it must answer.
        follow: the answer will be compared with later ones.

    Raises:
        AskError: it does not listen, ended, or did not answer in time.
    """
    path = socket_of(pid)
    if path is None:
        raise AskError(_gone(pid) or f"process {pid} does not listen")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            if peer(connection)[1] not in (os.geteuid(), 0, _owner(pid)):
                raise AskError(f"{path} is another user's socket, not that of process {pid}")
            question = Question(within_s=timeout_s * _WAITING_SHARE, follow=follow)
            connection.sendall(msgspec.json.encode(question) + b"\n")
            return msgspec.json.decode(read_line(connection, _LONGEST_ANSWER), type=Answer)
        except TimeoutError:
            raise AskError(
                f"process {pid} did not answer within {duration(timeout_s)}: it is stopped, or in code that "
                "keeps the interpreter"
            ) from None
        except (OSError, ValueError) as error:
            raise AskError(_gone(pid) or f"process {pid} broke off ({error})") from None


def _gone(pid: int) -> str | None:
    """Say that a process has ended; None if it has not."""
    with suppress(psutil.NoSuchProcess):
        if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            return None
    return f"process {pid} ended before it answered"


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1
