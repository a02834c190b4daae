"""Find the blocks that, allocated and freed before a program begins, make its memory pack closely.

A few large segments of the right sizes leave less free memory between live blocks than many that were made
one by one. The right sizes are found by trial: each choice goes through the simulator and, if requested, also
under other settings of the allocator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import MappingProxyType
from typing import Final

import msgspec

from memtriage.allocator.priming import (
    Blocks,
    Circumstance,
    PackingTrial,
    compressed,
    most_alive,
    peak_live,
)
from memtriage.allocator.requests import (
    Request,
    Requests,
    evaluated,
    reordered,
    repeated,
    settled,
    shortened,
    with_workspaces,
)
from memtriage.allocator.settings import OWN_SEGMENT, SEGMENT_STEP, AllocatorSettings
from memtriage.model.priming import PrimingCheck
from memtriage.model.units import MIB


@dataclass(frozen=True, slots=True)
class PrimingPolicy:
    """How blocks are searched for, and when they are worth it.

    Attributes:
        requests: most requests simulated during the search: a million take about a second.
        more_requests: the same for each of the other settings.
        pool_requests: the same with pools, for each of several searches: one that cools slowly ends at
            another choice.
        divided: part of the requests spent in addition on blocks for the largest sizes with the rest divided
            evenly.
        patience: the search ends after this many requests without a better choice.
        near: a choice is good enough if it reserves at most this share more than is alive at the peak.
        grid: number of sizes of a single block that are tried first, as fractions of the peak. Larger ones,
            up to what is reserved without blocks, are tried with the divided blocks.
        searched_steps: steps that a search simulates. The optimizer allocates its states in the first, and
            the second shows their effect.
        horizon: steps of the trace that a choice must pass; issue reports of fragmentation speak of tens.
        tolerance: on a perturbed trace, a choice may be worse than no blocks by this share.
        least_gain: blocks must save at least this share of what is reserved.
        settings_gain: other settings must save at least this share in addition to blocks, because they also
            affect memory that was not predicted, such as workspaces of libraries. If less than that could be
            saved, neither settings nor pools are tried.
        pool_gain: pools must save at least this share in addition to blocks.
        workspace: size of a workspace at the peak of each step of a program with convolutions, as a part of
            the peak. With it, a choice must not be worse than no blocks without it: a primed U-Net reserved
            4 % more than predicted.
        shares: lengths of other batches, as shares of the longest.
        kept: blocks of an evaluation that are alive at the same time.
        searched_under: circumstances under which each choice is tried; the first is as predicted.
        predicted: weight of the bytes reserved as predicted; the other circumstances share the rest.
        checked_under: circumstances that each new best choice must pass.
        warmest: at its beginning, the search may continue from a choice that is worse by up to this share.
        room: share of the peak by which a block of the best choice is enlarged, if unpredicted memory of
            that size would make the program reserve much more. SegFormer reserved 20 % more than predicted:
            its blocks had room for 24 MiB.
    """

    requests: int = 60_000_000
    more_requests: int = 8_000_000
    pool_requests: tuple[int, ...] = (30_000_000, 60_000_000)
    divided: float = 0.25
    patience: int = 40_000_000
    near: float = 0.004
    grid: int = 140
    searched_steps: int = 4
    horizon: int = 40
    tolerance: float = 0.005
    least_gain: float = 0.005
    settings_gain: float = 0.02
    pool_gain: float = 0.003
    workspace: float = 0.04
    shares: tuple[float, ...] = (0.75, 0.5, 0.9, 1.0, 0.6)
    kept: int = 6
    searched_under: tuple[Circumstance, ...] = (
        Circumstance(),
        Circumstance(unpredicted=32 * MIB),
        Circumstance(0, 8 * MIB),
        Circumstance(1),
        Circumstance(2, 20 * MIB),
        Circumstance(unpredicted=4 * MIB),
    )
    predicted: float = 0.6
    checked_under: tuple[Circumstance, ...] = (
        Circumstance(),
        Circumstance(unpredicted=8 * MIB),
        Circumstance(unpredicted=16 * MIB),
        Circumstance(0, 2 * MIB),
        Circumstance(3, 4 * MIB),
        Circumstance(4),
    )
    warmest: float = 0.02
    room: float = 0.005


POLICY: Final = PrimingPolicy()
BRIEF: Final = PrimingPolicy(requests=1_000_000, patience=400_000, grid=40)
"""A search of one or two seconds: a recording may have a million requests, and a plan has many programs."""
POOLS: Final = "states in pools"
"""The name of the trial with pools."""
_SEED: Final = 0
"""So that a search finds the same blocks each time."""


@dataclass(frozen=True, slots=True)
class Apart:
    """A program with a part in separate pools.

    Attributes:
        requests: the requests of the rest.
        pools: bytes of the pools, which count from the beginning.
    """

    requests: Requests
    pools: int


@dataclass(slots=True)
class PrimingChoice:
    """What a search found.

    Attributes:
        blocks: to allocate and free; empty if nothing helps.
        settings: the name of the other settings that they are for; empty for the program's own.
        apart: whether they are for a part of the program, with pools for the rest.
        without_pools: bytes of segments in the first check if no pool can be made; 0 if none is wanted.
        checks: the traces that it was checked on.
        tried: the result of the best blocks under the program's settings (without a name), under the others
            and with `POOLS`. If no blocks pass the checks, `after` is the figure of the unchanged program.
        rejected: choices that were better on the trace itself, but failed a check.
    """

    blocks: Blocks = ()
    settings: str = ""
    apart: bool = False
    without_pools: int = 0
    checks: list[PrimingCheck] = field(default_factory=list)
    tried: list[PrimingCheck] = field(default_factory=list)
    rejected: int = 0


def choose(
    requests: Requests,
    settings: AllocatorSettings,
    policy: PrimingPolicy = POLICY,
    others: Mapping[str, AllocatorSettings] = MappingProxyType({}),
    apart: Apart | None = None,
) -> PrimingChoice:
    """Find the blocks that help most, checked on similar traces; none if nothing helps.

    Args:
        requests: of the program; with several steps if known.
        settings: the allocator's.
        policy: how much is tried.
        others: other settings for which blocks may be chosen, by name. They are tried in order until memory
            packs closely.
        apart: the program with pools, which is tried after that, under the program's settings.
    """
    cases, checks = _cases(requests, policy), _checks(requests, policy)
    trial = PackingTrial(_unlimited(settings))
    for each in (*checks, *cases):
        against = each.requests if each.against is None else each.against
        each.before = trial.run(against, (), under=each.under) or 0
    attempts = [("", settings, policy.requests)]
    attempts += [(name, other, policy.more_requests) for name, other in others.items()]
    if apart is not None:
        attempts += [(POOLS, settings, most) for most in policy.pool_requests]
    best = PrimingChoice()
    tried: list[PrimingCheck] = []
    for name, tried_settings, most in attempts:
        own_cases, own_checks, pools = cases, checks, 0
        if name == POOLS and apart is not None:
            own_cases = _as_before(_cases(apart.requests, policy), cases)
            own_checks = _as_before(_checks(apart.requests, policy), checks)
            pools = apart.pools
        search = _BlockSearch(own_cases, _unlimited(tried_settings), policy, own_checks, pools)
        found = search.run(most, alone=bool(name))
        after = found.checks[0].after
        tried.append(PrimingCheck(name=name, before=search.without_blocks(), after=after))
        gain = policy.pool_gain if name == POOLS else policy.settings_gain
        if not name or after < best.checks[0].after - gain * checks[0].before:
            best = found
            best.settings, best.apart = ("", True) if name == POOLS else (name, False)
        if search.packs_closely or after - search.peak < policy.settings_gain * checks[0].before:
            break
    if best.apart:
        best.without_pools = trial.run(checks[0].requests, best.blocks, under=checks[0].under) or 0
    best.tried = tried
    return best


def _as_before(parts: list[_TriedTrace], whole: Sequence[_TriedTrace]) -> list[_TriedTrace]:
    """Make traces of a part of a program compare with the whole program without blocks."""
    for part, each in zip(parts, whole, strict=True):
        part.before = each.before
    return parts


def _unlimited(settings: AllocatorSettings) -> AllocatorSettings:
    return msgspec.structs.replace(settings, memory_fraction=None)  # a search has no limit


@dataclass(slots=True)
class _TriedTrace:
    """A trace that each choice is tried on, or that it must pass.

    Attributes:
        requests: of the trace.
        under: the circumstances.
        name: of a check.
        weight: weight of the reserved bytes, of a trace that choices are tried on.
        against: what a choice is compared with; by default the trace itself.
        before: bytes of segments that this makes without blocks, under the program's settings.
    """

    requests: list[Request]
    under: Circumstance = field(default_factory=Circumstance)
    name: str = ""
    weight: float = 0.0
    against: list[Request] | None = None
    before: int = 0


def _searched(requests: Requests, policy: PrimingPolicy) -> Requests:
    """The requests that a search simulates: different steps only show over several rounds what they leave."""
    if len(requests.steps) > 2 and not settled(requests):
        return repeated(requests, 3 * policy.searched_steps)
    return Requests(requests.before, requests.steps[: policy.searched_steps])


def _checks(requests: Requests, policy: PrimingPolicy) -> list[_TriedTrace]:
    """The checks that a choice must pass; first the program itself."""
    longer = repeated(requests, policy.horizon)
    name = f"{len(longer.steps)} steps" if longer.steps else "as recorded"
    checks = [_TriedTrace(longer.all(), name=name)]
    few = repeated(requests, 2 * policy.searched_steps)
    for under in policy.checked_under[1:]:
        words = "the usual addresses" if under.addresses is None else "other addresses"
        if under.unpredicted:
            words += f", {under.unpredicted // MIB} MiB more"
        checks.append(_TriedTrace(few.all(), under, words))
    checks += _similar(requests, policy)
    if len(requests.steps) > 1 and any(step.forward for step in few.steps):
        checks.append(_TriedTrace(evaluated(few, policy.kept).all(), name="evaluation after each step"))
    return checks


def _similar(requests: Requests, policy: PrimingPolicy) -> Iterator[_TriedTrace]:
    """Traces with which a choice must not be worse. A search without them found choices that failed every
    check."""
    if len(requests.steps) < 2:
        return
    other = reordered(requests, _SEED)
    if other is not None:
        yield _TriedTrace(other.all(), name="steps in another order")
    few = repeated(requests, 2 * policy.searched_steps)
    if requests.convolves:
        taken = with_workspaces(few, policy.workspace).all()
        yield _TriedTrace(taken, name="other workspaces at the peak", against=few.all())
    yield _TriedTrace(shortened(few, policy.shares).all(), name="shorter batches")


def _cases(requests: Requests, policy: PrimingPolicy) -> list[_TriedTrace]:
    """The traces that each choice is tried on; first the program as predicted."""
    searched = _searched(requests, policy)
    own = compressed(searched.all())
    first, *others = policy.searched_under
    cases = [_TriedTrace(own, first, weight=policy.predicted if others else 1.0)]
    cases += [_TriedTrace(own, under, weight=(1 - policy.predicted) / len(others)) for under in others]
    similar = _similar(requests, policy)
    return cases + [replace(each, requests=compressed(each.requests)) for each in similar]


class _BlockSearch:
    """Tries single blocks of many sizes first; then several, changed at random from the best; then blocks for
    the largest sizes, with the rest divided evenly, and changes of the best of these.

    A change is kept if it is better, or only a little worse: less and less as the search continues. A trial
    ends as soon as it reserves more than could be kept. A choice that is better than the best must pass the
    checks; if it does not, the search still continues from it, and checks everything that it finds there.

    Args:
        cases: the traces that choices are tried on.
        settings: the allocator's settings for them.
        checks: the checks that a choice must pass.
        pools: bytes of segments that count in addition.

    Attributes:
        peak: of live bytes, with pools.
    """

    def __init__(
        self,
        cases: Sequence[_TriedTrace],
        settings: AllocatorSettings,
        policy: PrimingPolicy,
        checks: Sequence[_TriedTrace],
        pools: int = 0,
    ) -> None:
        self._pools = pools
        self._trial = PackingTrial(settings)
        self._cases = list(cases)
        self.peak = peak_live(cases[0].requests) + pools
        self._policy = policy
        self._random = Random(_SEED)
        self._checking = PackingTrial(settings)
        self._checks = checks
        self._shortest_first = sorted(range(len(checks)), key=lambda at: len(checks[at].requests))
        self._rejected: set[Blocks] = set()
        self._best: Blocks = ()
        self._after = [check.before for check in checks]
        sizes = Counter(_up(size) for _, size in cases[0].requests if size >= OWN_SEGMENT)
        self._sizes = sorted(sizes, reverse=True)[:_MOST_SIZES]
        self._alive = most_alive(cases[0].requests)
        self._lowest = self._leading = sum(case.weight * case.before for case in cases)
        self._leader: Blocks = ()
        self._found = 0

    @property
    def packs_closely(self) -> bool:
        """Whether the best choice is good enough."""
        return self._lowest <= self.peak * (1 + self._policy.near)

    def without_blocks(self) -> int:
        """Bytes of segments in the first check, without blocks."""
        check = self._checks[0]
        return (self._checking.run(check.requests, (), under=check.under) or 0) + self._pools

    def run(self, most: int, alone: bool) -> PrimingChoice:
        """The best choice that passes all checks.

        Args:
            most: how many requests are simulated at most.
            alone: also try no blocks: the settings alone may save enough.
        """
        self._most = most
        if alone:
            self._try((), self._leading)
        if self.peak >= OWN_SEGMENT:
            self._single(range(1, self._policy.grid + 1))
            self._several()
            self._divided(int(self._policy.divided * most))
            self._give_room()
        checked = [
            PrimingCheck(name=check.name, before=check.before, after=after)
            for check, after in zip(self._checks, self._after, strict=True)
        ]
        return PrimingChoice(self._best, checks=checked, rejected=len(self._rejected))

    def _try(self, blocks: Blocks, limit: float) -> float | None:
        """The value by which choices are compared: weighted bytes of segments, and by how much they are
        worse; None above the limit."""
        value = 0.0
        rest = 1.0
        passes = True
        for at, case in enumerate(self._cases):
            rest -= case.weight
            allowed = case.before * (1 + self._policy.tolerance)
            left = limit - value - rest * self.peak - case.weight * allowed
            most = allowed + left / (case.weight if left < 0 else case.weight + 1)
            outcome = self._trial.run(case.requests, blocks, int(most) - self._pools, case.under)
            if outcome is None:
                if at > 1:  # try a failing case earlier the next time
                    self._cases.insert(at - 1, self._cases.pop(at))
                return None
            outcome += self._pools
            value += case.weight * outcome + max(0.0, outcome - allowed)
            passes = passes and outcome <= allowed
        if value < self._leading:
            self._leader, self._leading, self._found = blocks, value, self._trial.simulated
        if value < self._lowest and blocks not in self._rejected:
            if passes:
                self._check(blocks, value)
            else:
                self._rejected.add(blocks)
        return value

    def _check(self, blocks: Blocks, value: float) -> None:
        """Keep blocks as the best if they pass the checks."""
        after = [0] * len(self._checks)
        for at in self._shortest_first:
            check = self._checks[at]
            share = self._policy.tolerance if at else -self._policy.least_gain
            most = int(check.before * (1 + share)) - self._pools
            now = self._checking.run(check.requests, blocks, most, check.under)
            if now is None:
                self._rejected.add(blocks)
                return
            after[at] = now + self._pools
        self._lowest, self._best, self._after = value, blocks, after

    def _single(self, parts: Iterable[int]) -> None:
        for part in parts:
            if self._trial.simulated >= self._most:
                return
            size = _up(self.peak * 21 * part // (20 * self._policy.grid))
            if size >= OWN_SEGMENT:
                self._try((size,), self._leading * (1 + self._policy.warmest))

    def _several(self) -> None:
        random, policy = self._random, self._policy
        now, value = self._leader, self._leading
        while not self.packs_closely and self._sizes:
            if self._trial.simulated >= min(self._most, self._found + policy.patience):
                return
            self._trial.simulated += 1
            left = 1 - self._trial.simulated / self._most
            blocks = self._changed(now)
            if blocks == now or not blocks or sum(blocks) + self._pools > self._lowest:
                continue
            warmth = policy.warmest * left**2 * random.random() ** 2
            found = self._try(blocks, value * (1 + warmth))
            if found is not None:
                now, value = blocks, found
            elif random.random() < _RETURN:
                now, value = self._leader, self._leading

    def _divided(self, more: int) -> None:
        """Try blocks for the largest sizes, with the rest divided evenly.

        Best fit takes the smallest block that is large enough. So while the rest uses small blocks, large
        ones stay whole for large requests that come late, such as in the first layers' backward pass.
        Otherwise gradients of later layers would split the freed memory.
        """
        begun, leading = self._trial.simulated, self._leading
        self._most = begun + more // 2
        grid = self._policy.grid
        self._single(range(grid + 1, int(self._lowest * 20 * grid / (21 * self.peak)) + 1))
        while not self.packs_closely and self._sizes and self._trial.simulated < self._most:
            self._trial.simulated += 1
            blocks = self._evenly()
            if blocks and sum(blocks) + self._pools <= self._lowest:
                self._try(blocks, self._leading)
        if self._leading < leading:
            self._most = begun + more
            self._several()

    def _give_room(self) -> None:
        """Enlarge that block of the best choice which then saves most additional reserved bytes."""
        room = max(1, int(self._policy.room * self.peak) // SEGMENT_STEP) * SEGMENT_STEP
        requests = self._cases[0].requests

        def reserved(blocks: Blocks, unpredicted: int) -> int:
            """Bytes of segments, in the worst case of which of two equal blocks is taken first."""
            under = (Circumstance(None, unpredicted), Circumstance(0, unpredicted))
            return self._pools + max(self._trial.run(requests, blocks, under=each) or 0 for each in under)

        found, after = self._best, self._after
        now = reserved(found, room) if found else 0
        if now <= after[0] + 2 * room:
            return
        larger = {
            tuple(sorted((*found[:place], size + room, *found[place + 1 :]), reverse=True))
            for place, size in enumerate(found)
        }
        for least, blocks in sorted((reserved(blocks, room), blocks) for blocks in larger):
            if least >= now - 2 * room:
                return
            if reserved(blocks, 0) <= after[0] + room:
                self._check(blocks, self._lowest)
                if self._best == blocks and self._after[0] <= after[0] + room:
                    return
                self._best, self._after = found, after

    def _evenly(self) -> Blocks:
        """Some blocks of the largest sizes, and equal blocks for the rest of what may be reserved."""
        random = self._random
        least = random.choice(self._sizes)
        large = [
            size for size in self._sizes if size >= least for _ in range(random.randint(0, self._alive[size]))
        ]
        rest = int(random.uniform(self.peak, max(self.peak, self._lowest))) - self._pools - sum(large)
        parts = random.randint(1, _MOST_PARTS)
        if rest // parts < OWN_SEGMENT:
            return ()
        return tuple(sorted([*large, *[_up(rest // parts)] * parts], reverse=True))

    def _changed(self, blocks: Blocks) -> Blocks:
        random = self._random
        sizes = list(blocks)
        for _ in range(random.choice((1, 1, 1, 2, 2, 3))):
            kind = random.random()
            count = len(sizes)
            if kind < 0.4 and count:
                place = random.randrange(count)
                sizes[place] = int(
                    sizes[place] * (1 + random.choice((-1, 1)) * 10 ** random.uniform(-3, -0.3))
                )
            elif kind < 0.55:
                sizes.append(random.choice(self._sizes) * random.choice((1, 1, 1, 2, 3, 4)))
            elif kind < 0.6:
                sizes.append(int(self.peak * 10 ** random.uniform(-2, -0.2)))
            elif kind < 0.7 and count:
                sizes.pop(random.randrange(count))
            elif kind < 0.8 and count > 1:
                sizes.append(sizes.pop(random.randrange(count)) + sizes.pop(random.randrange(count - 1)))
            elif kind < 0.9 and count:
                place = random.randrange(count)
                part = int(sizes[place] * random.random())
                sizes[place] -= part
                sizes.append(part)
            elif count > 1:
                giver, taker = random.sample(range(count), 2)
                moved = int(sizes[giver] * 10 ** random.uniform(-2.5, -0.3))
                sizes[giver] -= moved
                sizes[taker] += moved
        return tuple(sorted((_up(size) for size in sizes if size >= OWN_SEGMENT), reverse=True))


_MOST_SIZES: Final = 12
"""This many of the largest sizes that the program requests are tried as blocks."""
_MOST_PARTS: Final = 30
_RETURN: Final = 0.002
"""Probability that a failed change sends the search back to the best choice: about once in 500."""


def _up(size: int) -> int:
    return -(-size // SEGMENT_STEP) * SEGMENT_STEP
