"""What a longer batch will need, by what shorter ones needed, and how sure that is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.longest_batch import (
    Ahead,
    Batches,
    BatchSize,
    DrawnBatches,
    Forecast,
    Needed,
    first_too_large,
    forecast,
    too_large_finding,
)
from memtriage.model.findings import Projection
from memtriage.model.units import MIB

GIB = 1024 * MIB
_LENGTHS = (100, 140, 180, 220, 260, 300, 340, 380, 420, 460, 470, 480)


def linear(batch: BatchSize) -> int:
    return 50 * MIB + 4096 * batch.volume


def quadratic(batch: BatchSize) -> int:
    return linear(batch) + 64 * batch.volume * batch.length


def seen(
    needs: Callable[[BatchSize], int], lengths: Sequence[int] = _LENGTHS, noise: float = 0.0
) -> list[Needed]:
    draw = random.Random(0)
    batches = [BatchSize(8, length) for length in lengths]
    return [Needed(batch, round(needs(batch) + noise * draw.gauss(0, 1))) for batch in batches]


def one(items: int, length: int) -> Batches:
    return Batches(np.array([items]), np.array([length]))


def at(fit: Forecast | None, items: int, length: int) -> tuple[float, float]:
    assert fit is not None
    expected, error = fit.at(one(items, length))
    return float(expected[0]), float(error[0])


@pytest.mark.parametrize("needs", [linear, quadratic])
@pytest.mark.parametrize(("items", "length"), [(8, 4000), (2, 4000), (8, 50), (64, 200)])
def test_a_law_that_the_readings_follow_is_found(
    needs: Callable[[BatchSize], int], items: int, length: int
) -> None:
    expected, error = at(forecast(seen(needs)), items, length)
    truth = needs(BatchSize(items, length))
    assert expected == pytest.approx(truth, rel=1e-3)
    assert abs(expected - truth) <= error + 1


@given(
    st.integers(0, 2**32), st.integers(0, 8192), st.integers(0, 64), st.floats(0, 4 * MIB), st.integers(0, 99)
)
def test_the_error_covers_the_noise(constant: int, per: int, curve: int, noise: float, seed: int) -> None:
    """Never surer than the readings: what is said to be the least is not more than the truth."""
    draw = random.Random(seed)

    def needs(batch: BatchSize) -> int:
        return constant + per * batch.volume + curve * batch.volume * batch.length

    batches = [BatchSize(8, draw.randint(64, 512)) for _ in range(24)]
    fit = forecast([Needed(batch, round(needs(batch) + draw.uniform(-noise, noise))) for batch in batches])
    if fit is not None:
        expected, error = at(fit, 8, 1024)
        assert expected - error <= needs(BatchSize(8, 1024)) * (1 + 1e-9) + 1


@pytest.mark.parametrize(
    "readings",
    [
        seen(linear, _LENGTHS[:3]),
        seen(linear, [100, 200, 300] * 5),
        seen(lambda batch: 50 * MIB),
        seen(lambda batch: 50 * MIB - batch.volume),
        seen(linear, noise=200 * MIB),
        [],
    ],
)
def test_where_sizes_do_not_explain_what_is_needed_there_is_no_forecast(readings: list[Needed]) -> None:
    assert forecast(readings) is None


def test_few_readings_give_a_line_though_they_are_on_a_curve() -> None:
    """Noise bends five readings: a batch of a program on a CPU was expected to need four times too much."""
    expected, error = at(forecast(seen(quadratic, _LENGTHS[:5])), 8, 4000)
    assert expected - error < quadratic(BatchSize(8, 4000)) / 2
    expected, error = at(forecast(seen(quadratic, _LENGTHS[:11])), 8, 4000)
    assert expected - error > quadratic(BatchSize(8, 4000)) * 0.9


def test_what_grows_more_slowly_is_not_taken_to_grow_in_proportion() -> None:
    """A collator that cuts at 300: longer items need no more."""
    fit = forecast(seen(lambda batch: linear(BatchSize(8, min(batch.length, 300)))))
    if fit is not None:
        expected, error = at(fit, 8, 4000)
        assert expected - error < linear(BatchSize(8, 4000)) / 4


def batches(*lengths: int) -> Batches:
    return Batches(np.full(len(lengths), 8), np.array(lengths))


def test_the_first_batch_that_cannot_fit_is_found() -> None:
    fit = forecast(seen(linear))
    assert fit is not None
    coming = batches(100, 5000, 200, 3000, 4000, 9000)
    limit = linear(BatchSize(8, 2900))
    ahead = first_too_large([fit], coming, 2, limit)
    assert ahead is not None and ahead.batch == 4  # 3,000 is within the error of 2,900
    assert ahead.expected == pytest.approx(linear(BatchSize(8, 4000)), rel=1e-3)
    assert first_too_large([fit], coming, 2, 10 * limit) is None
    assert first_too_large([fit], coming, 6, 0) is None
    assert first_too_large([], coming, 0, 0) is None


def test_the_instant_of_a_step_that_needs_most_decides() -> None:
    low, high = forecast(seen(linear)), forecast(seen(quadratic))
    assert low is not None and high is not None
    coming, limit = batches(2000, 3000), linear(BatchSize(8, 3000))
    for fits in ([low, high], [high, low]):
        ahead = first_too_large(fits, coming, 0, limit)
        assert ahead is not None and ahead.batch == 0 and ahead.seen == seen(quadratic)
    assert first_too_large([low], coming, 0, limit) is None


def test_the_finding_has_the_step_the_figures_and_what_they_rest_on() -> None:
    coming = batches(100, 4096, 5000)
    ahead = Ahead(1, 90 * GIB, GIB, seen(linear))
    full = Projection(device="cuda:0", limit=80 * GIB, step=8412)
    finding = too_large_finding(ahead, coming, 2 * GIB, full)
    assert (finding.kind, finding.certainty, finding.device) == ("out_of_memory", "suspected", "cuda:0")
    assert (finding.bytes, finding.projection, finding.playbook) == (92 * GIB, full, "M16")
    assert finding.mechanism == (
        "the batch of step 8,412 will not fit: 8 x 4,096 elements, padding included (the first too long; the "
        "longest of this epoch has 5,000); activations grow with the batch"
    )
    assert finding.evidence[:2] == [
        "the batch of step 8,412 needs 92.0 GiB ± 1.0 GiB, of which 2.0 GiB are in use between steps; cuda:0 "
        "has 80.0 GiB",
        "fitted to 12 steps, from 53.1 MiB with 8 x 100 to 65.0 MiB with 8 x 480",
    ]
    drawn = too_large_finding(ahead, coming, 2 * GIB, Projection(device="cuda:0", limit=80 * GIB))
    assert drawn.mechanism is not None and drawn.mechanism.startswith(
        "the longest batch will not fit: 8 x 4,096 elements, padding included (it may come at any step"
    )
    longest = too_large_finding(Ahead(2, 90 * GIB, GIB, seen(linear)), coming, 0, full)
    assert longest.mechanism is not None and "(the longest of this epoch)" in longest.mechanism


def test_batches_of_a_random_order_are_known_by_their_elements() -> None:
    drawn = DrawnBatches(8, np.array([100, 250, 250, 400] * 5))
    assert (drawn.batches, drawn.longest) == (3, BatchSize(8, 400))
    assert [drawn.of(8 * length) for length in (100, 250)] == [BatchSize(8, 100), BatchSize(8, 250)]
    assert [drawn.of(elements) for elements in (801, 8 * 200, 4 * 100)] == [None] * 3


def certain(fit: Forecast | None) -> Forecast:
    assert fit is not None
    return fit


def test_a_line_takes_four_sizes_and_a_curve_eleven_readings() -> None:
    assert len(certain(forecast(seen(linear, _LENGTHS[:4]))).coefficients) == 2
    assert len(certain(forecast(seen(quadratic, _LENGTHS[:10]))).coefficients) == 2
    assert len(certain(forecast(seen(quadratic, _LENGTHS[:11]))).coefficients) == 3


def test_the_error_bar_is_three_standard_errors_and_wider_from_few_readings() -> None:
    # 1000 bytes off, up and down by turns, so that the line stays: two degrees of freedom are left of four.
    off = {100: 1000, 200: -1000, 300: -1000, 400: 1000}
    fit = certain(
        forecast([Needed(batch := BatchSize(8, length), linear(batch) + by) for length, by in off.items()])
    )
    assert fit.deviation == pytest.approx(3 * (1 + 5 / 2) * (4 * 1000**2 / 2) ** 0.5)


def test_a_twentieth_of_the_rise_beyond_the_largest_reading_is_uncertain() -> None:
    fit = forecast(seen(linear))
    rise = linear(BatchSize(8, 4800)) - linear(BatchSize(8, 480))
    assert at(fit, 8, 4800)[1] == pytest.approx(rise / 20, rel=1e-3)
    assert at(fit, 8, 480)[1] == pytest.approx(0, abs=100)
