"""Containers and arrays that grow from census to census, and the lines that make and store their entries."""

from __future__ import annotations

from typing import Any

import pytest

from memtriage.account.census import Look
from memtriage.diagnose.growth.holders import GrowingData
from memtriage.model.paths import in_words
from memtriage.observe.sites import SiteRecorder
from memtriage.session.schedule.ordinary_data import OrdinaryData

pytestmark = pytest.mark.usefixtures("only_new_objects")

SOURCE = """
import numpy as np

texts, seldom = [bytes(1000)], [bytes(3000)]
seen = np.arange(200_000)
log = np.arange(300_000)

def more(count):
    texts.extend(bytes(1000) for _ in range(count))

def longer(values, count):
    return np.concatenate([values, np.zeros(count, values.dtype)])
"""


class Sites(SiteRecorder):
    """Allocations of the position before a census, by line; the lines have names."""

    lines: dict[tuple[str, int], int] = {}

    def live_by_line(self) -> dict[tuple[str, int], int]:
        return self.lines

    def named(self, trace: Any) -> str | None:
        return f"{trace[0][0]}:{trace[0][1]}" if trace else None


class Followed:
    """A program, and what its censuses show of ordinary data."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.data = OrdinaryData()
        self.sites = Sites(None)
        program.run(SOURCE)

    def census(self, position: float, lines: dict[tuple[str, int], int] | None = None) -> None:
        self.sites.lines = lines or {}
        compared = self.data.compared()
        with Look(wanted=compared.of_libraries) as view:
            self.data.add(view, position, compared, self.sites)

    def growing(self) -> dict[str, GrowingData]:
        """What grows of the program, by its path."""
        found = {in_words(each.path): each for each in self.data.growing()}
        return {path: growing for path, growing in found.items() if path.startswith("train.")}


@pytest.fixture
def followed(program: Any) -> Followed:
    return Followed(program)


def test_a_list_has_its_lengths_from_the_census_before_its_first_rise_on(followed: Followed) -> None:
    followed.census(2)
    assert followed.growing() == {}
    followed.program["more"](4)
    followed.census(4)
    followed.program["more"](6)
    followed.census(7)
    (texts,) = followed.growing().values()
    assert in_words(texts.path) == "train.texts[*]"
    assert texts.entries == ((2, 1), (4, 5), (7, 11))
    assert (texts.kind, texts.native, texts.lengthens) == ("list", None, False)
    assert texts.entry_bytes == pytest.approx(1033, abs=16)


def test_a_list_that_is_at_rest_is_followed_for_as_long_as_from_entry_to_entry(followed: Followed) -> None:
    followed.census(0)
    followed.program["more"](1)
    followed.census(10)  # one entry in ten positions: a pause of 16 is none
    followed.census(26)
    assert [each.entries for each in followed.growing().values()] == [((0, 1), (10, 2))]
    followed.census(27)
    assert followed.growing() == {}


def test_a_list_that_loses_its_entries_is_not_followed(followed: Followed) -> None:
    followed.census(0)
    followed.program["more"](1)
    followed.census(10)
    followed.program["texts"].clear()
    followed.census(12)
    assert followed.growing() == {}


def test_the_line_that_allocates_as_fast_made_the_entries_and_stays_known(followed: Followed) -> None:
    followed.census(2)
    made_by = []
    three, nine = ("train.py", 3), ("train.py", 9)
    for number, lines in enumerate(
        ({three: 1000}, {three: 4300}, {three: 1100, nine: 90_000}, {}, {nine: 4100})
    ):
        followed.program["more"](4)
        followed.census(4 + 2 * number, lines)  # 2 entries of 1033 bytes per position
        (texts,) = followed.growing().values()
        made_by.append(texts.allocated_at)
        assert followed.data.lacks_sites or texts.allocated_at is not None
    assert made_by == [None, None, "train.py:3", "train.py:3", "train.py:9"]


def test_an_array_that_a_longer_one_with_its_content_replaces_grows(followed: Followed) -> None:
    module = vars(followed.program.module)
    for at in (1, 2, 4):
        followed.census(at)
        module["seen"] = module["longer"](module["seen"], 100_000)
        module["log"] = module["log"] + 1  # other content
    (seen,) = followed.growing().values()
    assert in_words(seen.path) == "train.seen"
    assert (seen.kind, seen.entry_bytes, seen.lengthens) == ("ndarray", 1, True)
    assert seen.entries == ((1, 1_600_000), (2, 2_400_000), (4, 3_200_000))
    module["seen"] = module["seen"][:300_000].copy()
    followed.census(5)
    assert followed.growing() == {}, "a shorter one begins again"


def test_an_array_that_is_not_replaced_keeps_its_lengths(followed: Followed) -> None:
    module = vars(followed.program.module)
    followed.census(1)
    module["seen"] = module["longer"](module["seen"], 100_000)
    followed.census(2)
    followed.census(3)
    assert [each.entries for each in followed.growing().values()] == [((1, 1_600_000), (2, 2_400_000))]


def test_positions_can_be_moved(followed: Followed) -> None:
    module = vars(followed.program.module)
    followed.census(1)
    for at in (2, 3):
        module["more"](1)
        module["seen"] = module["longer"](module["seen"], 100_000)
        followed.census(at)
    followed.data.move(lambda position: 10 * position)
    assert {name: [at for at, _ in each.entries] for name, each in followed.growing().items()} == {
        "train.texts[*]": [10, 20, 30], "train.seen": [10, 20, 30],
    }  # fmt: skip
    module["seldom"].append(b"")
    followed.census(40)
    assert followed.growing()["train.seldom[*]"].entries == ((30, 1), (40, 2))
