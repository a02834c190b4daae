"""Byte counts in words, as every report and every sentence of evidence writes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30


_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
UNKNOWN: Final = "n/a"
_MINUTE: Final = 60
_HOUR: Final = 60 * _MINUTE
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def size(count: int | float | None) -> str:
    """Return bytes with one decimal in the largest binary unit that keeps the number below 1,024.

    >>> size(171966464), size(512), size(-2048), size(None)
    ('164.0 MiB', '512 B', '-2.0 KiB', 'n/a')
    """
    if count is None:
        return UNKNOWN
    if abs(count) < 1024:
        return f"{count:.0f} B"
    value = float(count)
    for unit in _UNITS:
        value /= 1024
        if round(abs(value), 1) < 1024 or unit == _UNITS[-1]:
            break
    return f"{value:.1f} {unit}"


def signed(nbytes: int) -> str:
    """Return a difference of bytes: `+4.0 MiB`.

    >>> signed(4 << 20), signed(-512), signed(0)
    ('+4.0 MiB', '-512 B', '0 B')
    """
    return f"+{size(nbytes)}" if nbytes > 0 else size(nbytes)


def parse_size(given: int | str, name: str) -> int:
    """Bytes of a size as people write it: `80GiB`, `24000MB` (powers of 1000 without the i) or a number.

    Args:
        given: the size.
        name: what it is, for the error.

    Raises:
        ValueError: it is none, not positive, or a small number without a unit.
    """
    if isinstance(given, str):
        match = _SIZE.fullmatch(given)
        if match is None:
            raise ValueError(f"{name} {given!r} is not a size: use 80GiB, 24000MB or bytes")
        number, unit, binary, byte = match.groups()
        if not unit and not byte and 0 < float(number) < 1024:
            raise ValueError(f"{name} {given} is {given} bytes; did you mean {given}GiB?")
        given = int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])
    if given <= 0:
        raise ValueError(f"{name}={given}; expected a positive number of bytes")
    return given


def parse_duration(given: str, name: str) -> float:
    """Seconds of a time as people write it: `90`, `90s`, `5m` or `1h`.

    Args:
        given: the time.
        name: what it is, for the error.

    Raises:
        ValueError: it is none, or not positive.
    """
    match = _DURATION.fullmatch(given)
    seconds = float(match[1]) * {"m": _MINUTE, "h": _HOUR}.get(match[2], 1) if match else 0.0
    if not seconds > 0:
        raise ValueError(f"invalid {name} '{given}': use 60s, 5m or 1h")
    return seconds


def rank_list(ranks: Iterable[int]) -> str:
    """Return rank numbers with runs drawn together.

    >>> rank_list([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7, 8'
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = [[rank] for rank in ordered[:1]]
    for before, rank in pairwise(ordered):
        if rank == before + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks with the noun.

    >>> ranks_in_words([3]), ranks_in_words([0, 1, 2])
    ('rank 3', 'ranks 0-2')
    """
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {rank_list(ranks)}"


def duration(seconds: float | None) -> str:
    """Return a time span in at most two units.

    >>> duration(0.0123), duration(9.87), duration(200), duration(7500)
    ('12 ms', '9.9 s', '3 min 20 s', '2 h 05 min')
    """
    if seconds is None:
        return UNKNOWN
    if round(seconds * 1000) < 1000:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    minutes = round(seconds / _MINUTE)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def measured_time(seconds: float | None) -> str:
    """Return a measured time with four digits, to tell small differences.

    >>> measured_time(0.0123456), measured_time(9.8764), measured_time(127.34), measured_time(0.0000512)
    ('12.35 ms', '9.876 s', '127.3 s', '51.20 us')
    """
    if seconds is None:
        return UNKNOWN
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1:
            return f"{four_digits(seconds * factor)} {unit}"
    return f"{four_digits(seconds * 1e6)} us"


def four_digits(value: float) -> str:
    """Return a number with four digits, or all of its whole ones.

    >>> four_digits(1.00412), four_digits(127.34), four_digits(12345.6), four_digits(0.98766)
    ('1.004', '127.3', '12346', '0.988')
    """
    whole = len(str(int(abs(value))))
    return f"{value:.{max(0, 4 - whole)}f}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "step"), count(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rate(amount: int | None, per: str) -> str:
    """Return growth in words.

    >>> rate(171966464, "step")
    '164.0 MiB per step'
    """
    return UNKNOWN if amount is None else f"{size(amount)} per {per}"


def is_process(name: str) -> bool:
    """Return whether what was judged is another process of the job, and no device.

    >>> is_process("worker 0 of train_loader"), is_process("cuda:0"), is_process("cpu")
    (True, False, False)
    """
    return _DEVICE.fullmatch(name) is None


def processes_in_words(names: Collection[str]) -> str:
    """Return processes, those that do the same work together.

    >>> processes_in_words(["worker 0 of loader", "worker 1 of loader", "rank 0"])
    '2 workers of loader, rank 0'
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(work_of(name), []).append(name)
    return ", ".join(of[0] if len(of) == 1 else f"{len(of)} {work}" for work, of in alike.items())


def work_of(name: str) -> str:
    """Return what processes that do the same work are called; of another name the name.

    >>> work_of("process 3 of ProcessPoolExecutor"), work_of("rank 0"), work_of("cpu")
    ('processes of ProcessPoolExecutor', 'ranks', 'cpu')
    """
    return _NUMBERED.sub(lambda found: f"{found[1]}{'es' if found[1].endswith('s') else 's'}{found[2]}", name)


_DEVICE: Final = re.compile(r"cpu|host|job|[a-z]+:\d+")
_NUMBERED: Final = re.compile(r"^(.*?) \d+(| of .*)$")


def devices_in_words(devices: Collection[str]) -> str:
    """Return devices with runs of numbers drawn together.

    >>> devices_in_words({"cuda:1", "cuda:0", "cuda:2"}), devices_in_words(["cpu"])
    ('cuda:0-2', 'cpu')
    """
    if len(devices) == 1:
        return next(iter(devices))
    numbers = [int(device.partition(":")[2]) for device in devices if device.partition(":")[2].isdigit()]
    return f"cuda:{rank_list(numbers)}" if len(numbers) == len(devices) else ", ".join(sorted(devices))
