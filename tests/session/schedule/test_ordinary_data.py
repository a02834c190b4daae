"""Containers and arrays that grow from census to census, and the lines that make and store their entries."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from msgspec.structs import replace

from memtriage.account.census import CensusView, Look
from memtriage.model.evidence import DataSeen
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
        self._at = 0.0
        program.run(SOURCE)

    def census(self, position: float, lines: dict[tuple[str, int], int] | None = None) -> dict[str, DataSeen]:
        """What a census finds of the program, by its path."""
        self.sites.lines = lines or {}
        self.data.begin(position - self._at)
        with Look(wanted=self.data.of_libraries) as view:
            found = self.data.add(view, self.sites)
        self._at = position
        by_path = {in_words(seen.path): seen for seen in found}
        assert len({seen.id for seen in found}) == len(found)
        return {path: seen for path, seen in by_path.items() if path.startswith("train.")}


@pytest.fixture
def followed(program: Any) -> Followed:
    return Followed(program)


def test_a_list_has_its_length_at_the_census_before_its_first_rise(followed: Followed) -> None:
    assert followed.census(2) == {}
    followed.program["more"](9)
    (first,) = followed.census(4).values()
    followed.program["more"](6)
    (texts,) = followed.census(7).values()
    assert in_words(texts.path) == "train.texts[*]"
    assert [(seen.before, seen.entries) for seen in (first, texts)] == [(1, 10), (None, 16)]
    assert (texts.id, texts.kind, texts.native, texts.lengthens) == (first.id, "list", None, False)
    place = sys.getsizeof(followed.program["texts"]) / 16
    assert texts.entry_bytes == pytest.approx(1033 + place, abs=16)


CROWD = """
class Player:
    def __init__(self):
        self.log = []

players = [Player() for _ in range(100)]

def play(steps):
    for player in players:
        player.log += [float(step) for step in range(steps)]
"""


def test_many_small_containers_with_one_path_are_followed_together(program: Any) -> None:
    followed = Followed(program)
    program.run(CROWD)
    program["play"](2)
    followed.census(1)
    program["play"](6)
    (first,) = followed.census(3).values()
    program["play"](4)
    (later,) = followed.census(5).values()
    program["players"][7].log.clear()
    program["play"](1)
    (cleared,) = followed.census(6).values()
    (unchanged,) = followed.census(7).values()
    assert unchanged.entries == cleared.entries
    for player in program["players"]:
        player.log.clear()
    assert followed.census(8) == {}
    assert in_words(later.path) == "train.players[*].log[*]"
    assert {seen.id for seen in (first, later, cleared)} == {first.id}
    assert [seen.entries for seen in (first, later, cleared)] == [800, 1200, 1300 - 12]
    assert (first.before, later.before) == (200, None)
    assert first.entry_bytes == pytest.approx(32 + 8, abs=8)  # a float, and its place in a list


REPLACED = """
kept = [bytes(1000) for _ in range(100)]

def more():
    global kept
    kept = kept + [bytes(1000) for _ in range(50)]
"""


def test_a_list_that_a_longer_one_replaces_is_the_same(program: Any) -> None:
    followed = Followed(program)
    program.run(REPLACED)
    followed.census(1)
    program["more"]()
    (first,) = followed.census(2).values()
    program["more"]()
    (later,) = followed.census(3).values()
    assert (first.id, first.before, first.entries, first.lengthens) == (later.id, 100, 150, True)
    assert (later.before, later.entries, later.stored_at) == (None, 200, first.stored_at)


def test_little_is_not_followed_until_it_grows_faster(followed: Followed) -> None:
    followed.census(0)
    followed.program["more"](3)
    assert followed.census(1) == {}  # 3 KiB per position: as much as a log
    followed.program["more"](5)
    assert [(seen.before, seen.entries) for seen in followed.census(2).values()] == [(4, 9)]
    followed.program["more"](1)
    assert [seen.entries for seen in followed.census(3).values()] == [10]  # it is followed by now


def test_in_libraries_only_what_grows_enough_or_did_is_searched(followed: Followed) -> None:
    slow, fast = followed.program["seldom"], followed.program["texts"]
    followed.census(0)
    slow.append(bytes(4096))  # over two positions
    fast.extend(bytes(4096) for _ in range(3))
    followed.data.begin(2.0)
    assert followed.data.of_libraries([slow, fast]) == [fast]
    assert followed.data.of_libraries([slow, fast], small=True) == [fast, slow]
    followed.census(2)
    fast.append(b"")
    followed.data.begin(2.0)
    assert followed.data.of_libraries([slow, fast]) == [fast]


def test_a_list_that_is_at_rest_is_still_followed(followed: Followed) -> None:
    followed.census(0)
    followed.program["more"](50)
    grown = followed.census(10)
    assert followed.census(26) == {path: replace(seen, before=None) for path, seen in grown.items()}


def test_cuts_are_of_the_length_of_a_list_at_each_census(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are only measured again when it is twice as long, and scaled until then."""
    measure, measured = CensusView.cuts_of_data, list[int]()

    def noted(view: CensusView, wanted: Any) -> Any:
        measured.append(at)
        return measure(view, wanted)

    monkeypatch.setattr(CensusView, "cuts_of_data", noted)
    followed.census(0)
    for at, count in enumerate([9, 9, 9, 29], 1):
        followed.program["more"](count)
        (texts,) = followed.census(2 * at).values()
        nbytes = sum(map(sys.getsizeof, followed.program["texts"]))
        assert [cut.cut for cut in texts.cuts] == ["bound"]
        assert texts.cuts[0].releases == texts.cuts[0].of == pytest.approx(nbytes, rel=0.02)
    assert measured == [1, 3, 4]


@pytest.mark.parametrize("clears", [True, False])
def test_a_list_that_loses_entries_or_is_gone_is_not_followed(followed: Followed, clears: bool) -> None:
    followed.census(0)
    followed.program["more"](50)
    assert followed.census(10)
    if clears:
        followed.program["texts"].clear()
    else:
        del vars(followed.program.module)["texts"]
    assert followed.census(12) == {}


def test_the_line_that_allocates_as_fast_made_the_entries_and_stays_known(followed: Followed) -> None:
    followed.census(2)
    made_by = []
    three, nine = ("train.py", 3), ("train.py", 9)
    for number, lines in enumerate(
        ({three: 1000}, {three: 8600}, {three: 2200, nine: 90_000}, {}, {nine: 8100})
    ):
        followed.program["more"](8)
        (texts,) = followed.census(4 + 2 * number, lines).values()  # 4 of about 1050 bytes each
        made_by.append(texts.allocated_at)
        assert followed.data.lacks_sites is (texts.allocated_at is None)
    assert made_by == [None, None, "train.py:3", "train.py:3", "train.py:9"]


def test_an_array_that_a_longer_one_with_its_content_replaces_grows(followed: Followed) -> None:
    module, found = vars(followed.program.module), []
    for at in (1, 2, 4):
        found.append(followed.census(at))
        module["seen"] = module["longer"](module["seen"], 100_000)
        module["log"] = module["log"] + 1  # other content
    assert [list(each) for each in found] == [[], ["train.seen"], ["train.seen"]]
    first, second = (each["train.seen"] for each in found[1:])
    assert (second.kind, second.entry_bytes, second.lengthens) == ("ndarray", 1, True)
    assert [(seen.before, seen.entries) for seen in (first, second)] == [
        (1_600_000, 2_400_000),
        (None, 3_200_000),
    ]
    module["seen"] = module["seen"][:300_000].copy()
    assert followed.census(5) == {}, "a shorter one begins again"
    module["seen"] = module["longer"](module["seen"], 100_000)
    again = followed.census(6)["train.seen"]
    assert (again.before, again.entries) == (2_400_000, 3_200_000) and again.id != second.id


def test_an_array_that_is_not_replaced_is_still_followed(followed: Followed) -> None:
    module = vars(followed.program.module)
    followed.census(1)
    module["seen"] = module["longer"](module["seen"], 100_000)
    grown = followed.census(2)["train.seen"]
    same = followed.census(3)["train.seen"]
    assert (same.id, same.entries, same.before) == (grown.id, grown.entries, None)
