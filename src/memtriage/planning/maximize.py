"""The largest batch and length of a program within a budget: every size is traced."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec import structs

from memtriage.model.plan import LargestSize, Maximum, SizedProgram
from memtriage.model.target import BATCH_NAMES, LENGTH_NAMES, SIZES, TraceTarget
from memtriage.planning.largest import SizeBounds, largest

NAMES: Final = {"batch": BATCH_NAMES, "seq": LENGTH_NAMES}
UNIT: Final = 64
"""Lengths are multiples of it where the program's own is."""

MARGIN: Final = 0.01
"""Part of the budget that stays free. Of six sizes that were found without one and run ten times each on an
H200, five always ran; the sixth needed 99.93 % of its budget, and never did."""
Trace = Callable[[TraceTarget, dict[str, Any]], SizedProgram]


def maximize(target: TraceTarget, budget: int, wanted: Sequence[str], trace: Trace) -> Maximum:
    """Find the largest sizes.

    Args:
        budget: device memory of the process, in bytes.
        wanted: `batch`, `seq`, or both: then the largest batch for each of several lengths.
        trace: returns what a program needs, with options of `traced_commands.sized`.

    Raises:
        ValueError: the program has no such size, or cannot be traced.
    """
    begun = time.perf_counter()
    room = budget - round(MARGIN * budget)
    sizes = _TracedSizes(target, trace)
    own = {name: sizes.own(name) for name in wanted}
    found: list[LargestSize] = []
    if len(wanted) == 1:
        name = wanted[0]
        search = largest(
            lambda size: sizes.needs({name: size}),
            own[name],
            room,
            UNIT if name == "seq" and own[name] % UNIT == 0 else 1,
        )
        found += _row(search, name, None)
    else:
        # From a quarter of the program's own length on, each twice the one before.
        batch, length = own["batch"], max(1, own["seq"] // 4)

        def measure(batch: int) -> int:
            return sizes.needs({"seq": length, "batch": batch})

        while True:
            search = largest(measure, batch, room)
            found += _row(search, "batch", length)
            if length >= own["seq"] and not search.below:
                break
            batch, length = max(1, search.below // 2), 2 * length
    return Maximum(
        budget=budget,
        margin=MARGIN,
        maximize=list(wanted),
        found=found,
        least_needs=min(sizes.known.values()),
        traces=sizes.traces,
        seconds=time.perf_counter() - begun,
        notes=list(sizes.notes),
    )


def _row(search: SizeBounds, name: str, length: int | None) -> list[LargestSize]:
    if not search.below:
        return []
    return [
        LargestSize(
            batch=search.below if name == "batch" else None,
            seq=search.below if name == "seq" else length,
            needs=search.needs[search.below],
            next=search.above,
            next_needs=None if search.above is None else search.needs[search.above],
        )
    ]


class _TracedSizes:
    """What a program needs at each size, traced once.

    Attributes:
        known: by batch and length.
        traces: how often it was traced.
        notes: what had to be assumed.
    """

    def __init__(self, target: TraceTarget, trace: Trace) -> None:
        self.known: dict[tuple[tuple[str, int], ...], int] = {}
        self.traces = 0
        self.notes: dict[str, None] = {}
        self._target = target
        self._trace = trace
        self._keywords: dict[str, tuple[str, str, int]] | None = None

    def own(self, name: str) -> int:
        """The program's own size.

        Raises:
            ValueError: it says none.
        """
        if self._target.hf_config is not None:
            return int(self._target.training.get(name, SIZES[name]))
        if self._is_script:
            return self._argument(name)[1]
        if self._keywords is None:
            self._keywords = self._traced(self._target, {}).keywords
        if name not in self._keywords:
            raise ValueError(
                f"nothing to maximize: neither `build` nor `step` has a keyword for {name}, such as "
                f"{NAMES[name][0]}=8 (also understood: {', '.join(NAMES[name][1:])})"
            )
        return self._keywords[name][2]

    def needs(self, sizes: dict[str, int]) -> int:
        """What it needs, in bytes."""
        key = tuple(sorted(sizes.items()))
        if key not in self.known:
            self.known[key] = self._sized(sizes).needs
        return self.known[key]

    @property
    def _is_script(self) -> bool:
        return ":" not in (self._target.name or "")

    def _sized(self, sizes: dict[str, int]) -> SizedProgram:
        if self._target.hf_config is not None:
            training = {**self._target.training, **sizes}
            return self._traced(structs.replace(self._target, training=training), {})
        if self._is_script:
            arguments = list(self._target.arguments)
            for name, size in sizes.items():
                at, _, prefix = self._argument(name)
                arguments[at] = f"{prefix}{size}"
            return self._traced(structs.replace(self._target, arguments=arguments), {})
        assert self._keywords is not None
        given: dict[str, dict[str, int]] = {"build": {}, "step": {}}
        for name, size in sizes.items():
            of, keyword, _ = self._keywords[name]
            given[of][keyword] = size
        return self._traced(self._target, {"arguments": given})

    def _traced(self, target: TraceTarget, options: dict[str, Any]) -> SizedProgram:
        self.traces += 1
        found = self._trace(target, options)
        self.notes.update(dict.fromkeys(found.notes))
        return found

    def _argument(self, name: str) -> tuple[int, int, str]:
        """Where a script's arguments have a size, its value, and what stands before it in the same word."""
        words = self._target.arguments
        for at, word in enumerate(words):
            option, equals, value = word.partition("=")
            if option.lstrip("-").replace("-", "_") not in NAMES[name] or not option.startswith("-"):
                continue
            if equals and value.isdecimal():
                return at, int(value), f"{option}="
            if at + 1 < len(words) and words[at + 1].isdecimal():
                return at + 1, int(words[at + 1]), ""
        raise ValueError(
            f"nothing to maximize: the script's arguments have no {name}; give it with a number, such as "
            f"--{NAMES[name][0].replace('_', '-')} 8"
        )
