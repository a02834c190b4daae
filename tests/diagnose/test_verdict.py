from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.verdict import verdict
from memtriage.model import Finding, FindingKind

KINDS = get_args(FindingKind)


def findings(*kinds):
    return [Finding(kind=kind, device="cuda:0") for kind in kinds]


@pytest.mark.parametrize(
    ("kinds", "word"),
    [
        ((), "clean"),
        (("leak",), "leak"),
        (("garbage_cycle",), "leak"),
        (("residue",), "residue"),
        (("fragmentation",), "fragmentation"),
        (("fragmentation", "residue"), "residue"),
        (("fragmentation", "residue", "garbage_cycle"), "leak"),
        (("out_of_memory",), "clean"),  # caught and survived
        (("rank_differs", "host_limit", "pinned_rounding", "private_pool", "stream_pool"), "clean"),
    ],
)
def test_first_that_holds(kinds, word):
    assert verdict(findings(*kinds), died_of_memory=False) == word


@given(st.lists(st.sampled_from(KINDS)))
def test_death_of_memory_outranks_all(kinds):
    assert verdict(findings(*kinds), died_of_memory=True) == "out_of_memory"


@given(st.lists(st.sampled_from(KINDS)), st.randoms())
def test_the_order_of_findings_does_not_matter(kinds, random):
    shuffled = list(kinds)
    random.shuffle(shuffled)
    assert verdict(findings(*kinds), False) == verdict(findings(*shuffled), False)
