"""Computed series of a counter whose growth is known: what grows, and what fills, jumps, swings or ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from memtriage.diagnose.growth.track import Floats, Points, Track

KIB, MIB = 1024, 1024**2
Chance = np.random.Generator


@dataclass(frozen=True)
class Shape:
    """Bytes that stay, as a part of all that is ever added, by the part of the run.

    Attributes:
        values: at each reading.
        rates: the least and the largest mean rate from the onset to the end that may be called true; per run.
        largest: part of all that comes in one rise; 0 where growth is smooth.
        onset, until, period: parts of the run.
    """

    values: Floats
    rates: tuple[float, float] = (1.0, 1.0)
    largest: float = 0.0
    onset: float = 0.0
    until: float | None = None
    period: float | None = None


@dataclass(frozen=True)
class Computed:
    """One series.

    Attributes:
        kind: of `GROWING` or `HEALTHY`.
        values: readings at positions 1, 2, ...
        rates: the least and the largest true rate, in bytes per position.
        noise: its size as a part of what is added altogether.
        shape: of what stays.
        how: kind of its noise.
    """

    kind: str
    values: Floats
    rates: tuple[float, float]
    noise: float
    shape: Shape
    how: str

    def rates_since(self, onset: float) -> tuple[float, float]:
        """Return the least and the largest true mean rate from a position to the end.

        Of smooth growth it is computed; rises of one size have their rate, and a late leak its own.
        """
        if self.kind not in ("quadratic", "exponential", "mixture"):
            return self.rates
        n, grown = len(self.values), self.shape.values
        at = min(n - 2, max(0, round(onset) - 1))
        left, total = 1 - at / (n - 1), self.rates[1] / self.shape.rates[1]
        mean, off = float(grown[-1] - grown[at]) / left, self.shape.largest / left
        return (mean - off) * total, (mean + off) * total

    @property
    def points(self) -> Points:
        """As a track keeps them."""
        track = Track()
        for position, value in enumerate(self.values.tolist(), 1):
            track.add(position, int(value))
        return track.points()


Drawn = Callable[[Floats, Chance], Shape]


def steady(u: Floats, chance: Chance) -> Shape:
    return Shape(u)


def quadratic(u: Floats, chance: Chance) -> Shape:
    bent = chance.uniform(0.3, 1)
    return Shape((1 - bent) * u + bent * u * u)


def exponential(u: Floats, chance: Chance) -> Shape:
    doublings = chance.uniform(1, 4)
    return Shape((2 ** (doublings * u) - 1) / (2**doublings - 1))


def periodic(u: Floats, chance: Chance) -> Shape:
    period = chance.integers(2, max(3, len(u) // 10 + 1))
    rises = (np.arange(len(u)) + chance.integers(period)) // period
    part = period / (len(u) - 1)
    return Shape(rises * part, largest=part, period=part)


def stairs(u: Floats, chance: Chance) -> Shape:
    """At least eight rises, which differ in size and distance by up to a third of the mean and more."""
    count = int(chance.integers(8, 60))
    gaps = chance.uniform(0.3, 1.7, count + 1)
    at = (np.cumsum(gaps) - gaps[0] * chance.random()) / gaps.sum()
    at = at[at < 1]
    sizes = chance.uniform(0.4, 1.6, len(at))
    sizes /= sizes.sum()
    rises = float(sizes[1:].sum() / (at[-1] - at[0])), float(sizes[:-1].sum() / (at[-1] - at[0])), 1.0
    values = np.concatenate(([0.0], np.cumsum(sizes)))[np.searchsorted(at, u, side="right")]
    return Shape(values, (min(rises), max(rises)), float(sizes.max()))


def late(u: Floats, chance: Chance) -> Shape:
    onset = chance.uniform(0.1, 0.7)
    rate = 1 / (1 - onset)
    return Shape(np.maximum(0, u - onset) * rate, (rate, rate), onset=onset)


def mixture(u: Floats, chance: Chance) -> Shape:
    kinds: list[Drawn] = [steady, quadratic, exponential, periodic, stairs]
    first, second = (kinds[i](u, chance) for i in chance.choice(len(kinds), 2, replace=False))
    part = chance.uniform(0.2, 0.8)
    off = part * first.largest + (1 - part) * second.largest
    return Shape(part * first.values + (1 - part) * second.values, (1 - off, 1 + off), off)


def flat(u: Floats, chance: Chance) -> Shape:
    return Shape(0 * u, (0, 0))


def ended(u: Floats, chance: Chance) -> Shape:
    until = chance.uniform(0.15, 0.75)
    kinds = [steady, quadratic, exponential, periodic]
    shape = kinds[int(chance.integers(len(kinds)))](u / until, chance)
    end = shape.values[u <= until][-1]
    return Shape(np.minimum(shape.values, end) / max(end, 1e-9), (0, 0), shape.largest, until=until)


def bounded(u: Floats, chance: Chance) -> Shape:
    until = chance.uniform(0.05, 0.75)
    return Shape(np.minimum(u / until, 1), (0, 0), until=until)


def filling(u: Floats, chance: Chance) -> Shape:
    """A cache that fills exponentially; of each new key, the chance that it is there already grows."""
    times = chance.uniform(1.2, 8)
    return Shape((1 - np.exp(-times * u)) / (1 - np.exp(-times)), (0, 0))


def rarer(u: Floats, chance: Chance) -> Shape:
    """Rises that get rarer: each distance is longer than the one before by a quarter at least."""
    at = np.cumsum(chance.uniform(1.25, 2) ** np.arange(12))
    at = at / at[-1] * chance.uniform(0.8, 1.2)
    return Shape(np.searchsorted(at, u, side="right") / 12, (0, 0), 1 / 12)


def jumps(u: Floats, chance: Chance) -> Shape:
    at = np.sort(chance.uniform(0.02, 0.98, int(chance.integers(1, 3))))
    sizes = chance.uniform(0.5, 1.5, len(at))
    return Shape(((u[:, None] > at) * sizes).sum(axis=1) / sizes.sum(), (0, 0), 1.0)


def release(u: Floats, chance: Chance) -> Shape:
    return Shape((u < chance.uniform(0.02, 0.98)) * 1.0, (0, 0))


def warm_up(u: Floats, chance: Chance) -> Shape:
    return Shape(1 - np.exp(-u / chance.uniform(0.003, 0.05)), (0, 0))


def teeth(u: Floats, chance: Chance) -> Shape:
    """Garbage that waits for the cyclic collector."""
    period = int(np.exp(chance.uniform(np.log(2), np.log(len(u) / 3))))
    return Shape((np.arange(len(u)) + chance.integers(period)) % period / period, (0, 0))


def _on(shape: Drawn, *others: Drawn) -> Drawn:
    """Return a leak with one of several healthy shapes of up to three times its size on top."""

    def both(u: Floats, chance: Chance) -> Shape:
        leak, other = shape(u, chance), others[int(chance.integers(len(others)))]
        return replace(leak, values=leak.values + chance.uniform(0, 3) * other(u, chance).values)

    return both


GROWING: Final[dict[str, Drawn]] = {
    "steady": steady,
    "quadratic": quadratic,
    "exponential": exponential,
    "periodic": periodic,
    "stairs": stairs,
    "late": late,
    "mixture": mixture,
    "on teeth": _on(steady, teeth),
    "with jumps": _on(steady, jumps),
    "with a release": _on(steady, release),
    "with a warm-up": _on(steady, warm_up),
}
HEALTHY: Final[dict[str, Drawn]] = {
    "flat": flat,
    "teeth": teeth,
    "jumps": jumps,
    "release": release,
    "warm-up": warm_up,
    "ended": ended,
    "bounded": bounded,
    "filling": filling,
    "rarer": rarer,
}


def _iid(n: int, chance: Chance) -> Floats:
    return chance.normal(0, 1, n)


def _ar(n: int, chance: Chance) -> Floats:
    """Noise that remembers up to a twentieth of the run."""
    memory = np.exp(-1 / chance.uniform(0.5, max(1, n / 20)))
    kernel = memory ** np.arange(min(n, int(8 / -np.log(memory)) + 1))
    noise = np.convolve(chance.normal(0, 1, n + len(kernel)), kernel, "full")[len(kernel) : n + len(kernel)]
    return noise * np.sqrt(1 - memory**2)


def _lognormal(n: int, chance: Chance) -> Floats:
    return chance.lognormal(0, chance.uniform(0.2, 1), n)


def _two_step(n: int, chance: Chance) -> Floats:
    return np.where(np.arange(n) % 2, 1.0, -1.0) + 0.1 * chance.normal(0, 1, n)


NOISES: Final = {"iid": _iid, "ar": _ar, "lognormal": _lognormal, "two-step": _two_step}


def draw(kind: str, seed: int, longest: float = 1e5, loudest: float = 5.0) -> Computed:
    """Draw a series of a kind: its length, size, parameters and noise."""
    chance = np.random.default_rng([seed, *map(ord, kind)])
    n = int(np.exp(chance.uniform(np.log(9), np.log(longest))))
    if kind in ("periodic", "stairs", "mixture"):
        n = max(n, 40)
    u = np.linspace(0, 1, n)
    shape = {**GROWING, **HEALTHY}[kind](u, chance)
    total = max(8 * MIB, 8 * KIB * n) * np.exp(chance.uniform(0, 5))
    how = sorted(NOISES)[int(chance.integers(len(NOISES)))]
    size = 0.0 if chance.random() < 0.15 else float(np.exp(chance.uniform(np.log(1e-4), np.log(loudest))))
    values = 1e10 + total * (shape.values + size * NOISES[how](n, chance))
    per = total / (n - 1)
    return Computed(kind, values.round(), (shape.rates[0] * per, shape.rates[1] * per), size, shape, how)
