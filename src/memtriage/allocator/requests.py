"""A program's requests to one arena of the allocator: the large blocks of the default stream, in order.

Small blocks and other streams have separate segments, so the packing of large blocks can be studied without
them. Sizes are bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from memtriage.allocator.events import AllocatorEvent
from memtriage.allocator.settings import SMALL_LIMIT, AllocatorSettings
from memtriage.model.blocks import DEFAULT_POOL

FREE: Final = 0
"""The size of a request that frees its block."""
EMPTIED: Final = -1
"""The block of a request that empties the cache."""
DEFAULT_STREAM: Final = 0

Request = tuple[int, int]
"""A block's number and its size; `FREE` as the size frees it."""


@dataclass(frozen=True, slots=True)
class StepRequests:
    """The requests of one step.

    Attributes:
        requests: in order.
        forward: how many of them come before the first backward pass; None where unknown.
    """

    requests: tuple[Request, ...]
    forward: int | None = None


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of a program.

    Attributes:
        before: what comes before the first step: building the model; all of it where steps are unknown.
        steps: the steps in order.
        convolves: whether there are convolutions: cuDNN may take other workspaces than those among the
            requests.
    """

    before: tuple[Request, ...]
    steps: tuple[StepRequests, ...] = ()
    convolves: bool = False

    def all(self) -> list[Request]:
        """Every request in order."""
        return [*self.before, *(request for step in self.steps for request in step.requests)]


@dataclass(slots=True)
class RequestLog:
    """Collects requests as the hook of a simulator. What a stream delays counts when it takes effect."""

    settings: AllocatorSettings
    requests: list[Request] = field(default_factory=list)
    _live: dict[int, int] = field(default_factory=dict)
    _count: int = 0

    def __call__(self, event: AllocatorEvent) -> None:
        if event.stream != DEFAULT_STREAM or event.pool != DEFAULT_POOL:
            return
        if event.action == "alloc" and self.settings.round_size(event.size) > SMALL_LIMIT:
            self._live[event.address] = self._count
            self.requests.append((self._count, event.size))
            self._count += 1
        elif event.action == "free_completed" and event.address in self._live:
            self.requests.append((self._live.pop(event.address), FREE))

    def emptied(self) -> None:
        """The cache was emptied."""
        self.requests.append((EMPTIED, FREE))


@dataclass(frozen=True, slots=True)
class _FreeToken:
    """A block that is freed: the step that made it, counted back from this one, and its place among those of
    that step; without `back` a block from before the first step, by its number."""

    place: int
    back: int | None


_Token = tuple[int, int] | _FreeToken | None
"""An allocation (place in the step, size), a free, or an emptied cache: the same for steps that are alike."""


class _StepTokens:
    """Steps as tokens that can be played again in any order."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        born: dict[int, tuple[int, int]] = {}
        self.tokens: list[tuple[_Token, ...]] = []
        for number, step in enumerate(requests.steps):
            tokens: list[_Token] = []
            count = 0
            for block, size in step.requests:
                if block == EMPTIED:
                    tokens.append(None)
                elif size:
                    born[block] = number, count
                    tokens.append((count, size))
                    count += 1
                elif block in born:
                    maker, place = born[block]
                    tokens.append(_FreeToken(place, number - maker))
                else:
                    tokens.append(_FreeToken(block, None))
            self.tokens.append(tuple(tokens))

    def period(self) -> int | None:
        """After how many steps the same one comes again; None where that was not seen."""
        last = len(self.tokens) - 1
        for period in range(1, last):
            if self.tokens[last] == self.tokens[last - period]:
                return period
        return None

    def _freed_later(self) -> set[tuple[int, int]]:
        """The step and the place there of each block that a later step frees.

        Of what the last step leaves this cannot be known. It is as with the step before that was alike;
        without one, all is taken to be freed.
        """
        found = {
            (number - token.back, token.place)
            for number, tokens in enumerate(self.tokens)
            for token in tokens
            if isinstance(token, _FreeToken) and token.back
        }
        last = len(self.tokens) - 1
        period = self.period()
        places = {token[0] for token in self.tokens[last] if isinstance(token, tuple)}
        for place in places:
            if period is None or (last - period, place) in found:
                found.add((last, place))
        return found

    def played(self, order: Sequence[int]) -> Requests:
        """The steps in this order.

        What a step leaves for a later one that does not come in this order is freed at the end of the step
        after it.
        """
        freed_later = self._freed_later()
        live: dict[tuple[int, int], int] = {}  # position in the order and place -> block
        built = {block for block, size in self.requests.before if size}
        built.difference_update(block for block, size in self.requests.before if not size)
        numbers = _numbers(self.requests)
        steps: list[StepRequests] = []
        for position, number in enumerate(order):
            played: list[Request] = []
            forward = self.requests.steps[number].forward
            for token in self.tokens[number]:
                if token is None:
                    played.append((EMPTIED, FREE))
                elif not isinstance(token, _FreeToken):
                    place, size = token
                    live[position, place] = block = next(numbers)
                    played.append((block, size))
                elif token.back is None:
                    if token.place in built:
                        built.discard(token.place)
                        played.append((token.place, FREE))
                else:
                    maker = live.pop((position - token.back, token.place), None)
                    if maker is not None:
                        played.append((maker, FREE))
            for key in [key for key in live if key[0] < position]:
                if (order[key[0]], key[1]) in freed_later:
                    played.append((live.pop(key), FREE))
            if number != position:
                # Played again, a step makes no second set of what lasts.
                lasting = {key for key in live if key[0] == position and (number, key[1]) not in freed_later}
                numbers_of = {live.pop(key) for key in lasting}
                played = [request for request in played if request[0] not in numbers_of]
            steps.append(StepRequests(tuple(played), forward))
        return Requests(self.requests.before, tuple(steps))


def _numbers(requests: Requests) -> Iterator[int]:
    """New block numbers."""
    return itertools.count(max((block for block, _ in requests.all()), default=0) + 1)


def settled(requests: Requests) -> bool:
    """Whether the last two steps are alike."""
    return _StepTokens(requests).period() == 1


def repeated(requests: Requests, steps: int) -> Requests:
    """As many steps: after those that are there, the last ones again, or all but the first where they differ.

    Requests without steps stay as they are.
    """
    known = len(requests.steps)
    if known < 2 or known >= steps:
        return requests
    played = _StepTokens(requests)
    cycle = range(known - (played.period() or known - 1), known)
    return played.played([*range(known), *(cycle[turn % len(cycle)] for turn in range(steps - known))])


def reordered(requests: Requests, seed: int) -> Requests | None:
    """The steps after the first in another order; None where they are alike."""
    played = _StepTokens(requests)
    known = len(requests.steps)
    if known < 3 or played.period() == 1:
        return None
    order = list(range(1, known))
    Random(seed).shuffle(order)
    return played.played([0, *order, *range(1, known)])


def shortened(requests: Requests, shares: Sequence[float]) -> Requests:
    """Each step after the first with shorter batches: the share of the sizes that depend on the batch.

    These are the blocks that are gone by the end of their step and have no size of a block that lasts, as
    gradients have.
    """
    freed = {block for block, size in requests.all() if not size}
    lasting = {size for block, size in requests.all() if size and block not in freed}
    steps = list(requests.steps[:1])
    for turn, step in enumerate(requests.steps[1:]):
        gone = {block for block, size in step.requests if not size}
        share = shares[turn % len(shares)]
        steps.append(
            StepRequests(
                tuple(
                    (block, int(size * share))
                    if size and block in gone and size not in lasting and size * share > SMALL_LIMIT
                    else (block, size)
                    for block, size in step.requests
                ),
                step.forward,
            )
        )
    return Requests(requests.before, tuple(steps))


def with_workspaces(requests: Requests, share: float) -> Requests:
    """Each step with a block that is freed at once, when the most is alive: what a library takes to work in.

    Args:
        share: its size, as a part of the most that is alive.
    """
    alive: dict[int, int] = {}
    highest = [_grow(alive, requests.before)[1]]
    places = []
    for step in requests.steps:
        place, most = _grow(alive, step.requests)
        places.append(place)
        highest.append(most)
    numbers = _numbers(requests)
    size = int(share * max(highest))
    steps = []
    for step, place in zip(requests.steps, places, strict=True):
        number = next(numbers)
        made = ((number, size), (number, FREE)) if size > SMALL_LIMIT else ()
        forward = step.forward
        if forward is not None and place <= forward:
            forward += len(made)
        steps.append(StepRequests((*step.requests[:place], *made, *step.requests[place:]), forward))
    return Requests(requests.before, tuple(steps))


def _grow(alive: dict[int, int], requests: Sequence[Request]) -> tuple[int, int]:
    """Follow requests; returns after how many of them the most bytes are alive, and how many these are.

    Args:
        alive: sizes of live blocks by number; changed.
    """
    live = most = sum(alive.values())
    place = 0
    for at, (block, size) in enumerate(requests, 1):
        if block == EMPTIED:
            continue
        live += size if size else -alive.pop(block)
        if size:
            alive[block] = size
        if live > most:
            place, most = at, live
    return place, most


def evaluated(requests: Requests, kept: int) -> Requests:
    """After each step but the first an evaluation: its forward pass, keeping only the last few blocks."""
    numbers = _numbers(requests)
    steps = list(requests.steps[:1])
    for step in requests.steps[1:]:
        evaluation: list[Request] = []
        window: list[int] = []
        for block, size in step.requests[: step.forward or 0]:
            if not size or block == EMPTIED:
                continue
            number = next(numbers)
            evaluation.append((number, size))
            window.append(number)
            if len(window) > kept:
                evaluation.append((window.pop(0), FREE))
        evaluation.extend((number, FREE) for number in window)
        steps.extend((step, StepRequests(tuple(evaluation), len(evaluation))))
    return Requests(requests.before, tuple(steps))
