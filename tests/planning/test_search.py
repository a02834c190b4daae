"""The search, on ladders whose savings are made up."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from memtriage.model.plan import PlannedPeak
from memtriage.planning.changes import Change, Rung
from memtriage.planning.evaluate import FINENESS, Evaluated
from memtriage.planning.search import LadderSearch
from memtriage.prediction.build import BuildError

START = 1000 * FINENESS


def change(rung, action, displaces=()):
    return Change(
        rung=rung, action=action, speed="", maths="same", code={"torch": ""}, displaces=frozenset(displaces)
    )


def rung(name, *ways, **options):
    track = tuple(change(name, f"{name} {way}", **options) for way in range(len(ways)))
    return Rung(name, "M4", lambda facts: (track,))


@dataclass
class Made:
    """An evaluator whose figures are those of a function of the actions."""

    needs: object
    limit: int
    asked: int = 0

    def of(self, changes):
        self.asked += 1
        needs = self.needs([item.action for item in changes])
        peak = PlannedPeak(allocated=needs, reserved=needs, needs=needs, phase="backward", by_owner={})
        return Evaluated(peak, needs <= self.limit, 0.0, frozenset())


def found(needs, limit, *rungs, requested=()):
    return LadderSearch(Made(needs, limit), rungs, frozenset(requested)).run(None)


def actions(changes):
    return [item.action for item in changes]


ways = st.lists(st.integers(2, 100), min_size=1, max_size=4, unique=True).map(sorted)


@given(st.lists(ways, min_size=1, max_size=6), st.integers(0, 500))
def test_where_savings_add_up_the_cheapest_set_is_found(ladder, gap):
    saved = {
        f"r{number} {way}": saving * FINENESS
        for number, savings in enumerate(ladder)
        for way, saving in enumerate(savings)
    }

    def needs(taken):
        return START - sum(saved[each] for each in taken)

    limit = START - gap * FINENESS
    rungs = [rung(f"r{number}", *savings) for number, savings in enumerate(ladder)]
    result = found(needs, limit, *rungs)
    most = [max(savings) for savings in ladder]
    assert result.evaluated.fits == (sum(most) >= gap)
    if not result.evaluated.fits or not result.changes:
        return
    dearest = int(result.changes[-1].rung[1:])
    assert sum(most[:dearest]) < gap, "cheaper rungs alone would do"
    for item in result.changes:
        rest = [other for other in actions(result.changes) if other != item.action]
        assert needs(rest) > limit, "a change is not needed"
        place = int(item.action.split()[1])
        if place:
            assert needs([*rest, f"{item.rung} {place - 1}"]) > limit, "a milder way would do"
    assert needs(actions(result.cheaper)) > limit


def test_a_rung_is_tried_again_when_the_peak_has_moved():
    def needs(taken):
        backward = 1000 - 500 * ("big 0" in taken)
        step = 900 - 600 * ("small 0" in taken)
        return max(backward, step) * FINENESS

    result = found(needs, 600 * FINENESS, rung("small", 1), rung("big", 1), rung("never", 1))
    assert actions(result.changes) == ["small 0", "big 0"]
    assert result.evaluated.fits
    assert [each.outcome for each in result.passed_over] == ["not needed"]


def test_what_raises_the_peak_is_left_out_and_said():
    def needs(taken):
        return (1000 + 50 * ("worse 0" in taken) - 300 * ("better 0" in taken)) * FINENESS

    result = found(needs, 100 * FINENESS, rung("worse", 1), rung("better", 1))
    assert actions(result.changes) == ["better 0"]
    assert not result.evaluated.fits and result.cheaper is None
    (worse,) = result.passed_over
    assert worse.outcome == "no help" and worse.saves == -50 * FINENESS and "raises" in worse.why


def test_the_better_of_two_tracks_is_taken():
    def needs(taken):
        return (1000 - 300 * ("coarse" in taken) - 500 * ("fine" in taken)) * FINENESS

    both = Rung("blocks", "M7", lambda facts: ((change("blocks", "coarse"),), (change("blocks", "fine"),)))
    assert actions(found(needs, 600 * FINENESS, both).changes) == ["fine"]


def test_a_displaced_rung_goes():
    def needs(taken):
        return (1000 - 100 * ("fused 0" in taken) - 400 * ("small 0" in taken)) * FINENESS

    small = rung("small", 1, displaces=["fused"])
    result = found(needs, 600 * FINENESS, rung("fused", 1), small)
    assert actions(result.changes) == ["small 0"]
    assert result.passed_over[0].why == "small takes its place"


def test_a_change_that_cannot_be_traced_is_passed_over():
    def needs(taken):
        if "broken 0" in taken:
            raise BuildError("it raised")
        return (1000 - 500 * ("good 0" in taken)) * FINENESS

    result = found(needs, 600 * FINENESS, rung("broken", 1), rung("good", 1))
    assert actions(result.changes) == ["good 0"]
    assert result.passed_over[0].outcome == "fails" and "it raised" in result.passed_over[0].why
