"""The rungs in their order, with the entry of the playbook that each is of."""

from __future__ import annotations

from memtriage.planning.facts import UNKNOWN
from memtriage.planning.ladder import ladder
from memtriage.playbook.entries import PLAYBOOK


def test_rungs_come_in_order_of_cost() -> None:
    rungs = ladder("", 1)
    assert [(rung.name, rung.playbook) for rung in rungs] == [
        ("expandable segments", "M8"),
        ("primed memory", "M8"),
        ("set_to_none", "M14"),
        ("attention", "M11"),
        ("optimizer step", "M17"),
        ("micro-batch", "M5"),
        ("bf16 autocast", "M6"),
        ("chunked loss", "M14"),
        ("checkpointing", "M7"),
        ("8-bit optimizer", "M12"),
        ("sharding", "M9"),
        ("bf16 weights", "M6"),
        ("offloaded optimizer", "M10"),
    ]
    assert {rung.playbook for rung in rungs} <= PLAYBOOK.keys()


def test_settings_of_the_allocator_need_no_change_of_the_program() -> None:
    rungs = ladder("", 1)
    assert {rung.name for rung in rungs if rung.configures} == {"expandable segments", "primed memory"}


def test_rungs_know_the_allocator_s_options_and_the_number_of_gpus() -> None:
    alone = {rung.name: rung for rung in ladder("expandable_segments:True", 1)}
    several = {rung.name: rung for rung in ladder("", 4)}
    for name in ("expandable segments", "primed memory", "sharding"):
        assert alone[name].offer(UNKNOWN).absent and not alone[name].offer(UNKNOWN).tracks
        assert several[name].offer(UNKNOWN).tracks and not several[name].offer(UNKNOWN).absent
