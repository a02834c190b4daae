"""What a running process is asked, and what it answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memtriage.model.asked import Answer, HeldHere, Question
from support.paths import items_of

PATH = items_of("main", "losses")


@pytest.mark.parametrize(
    ("given", "holder"),
    [
        ({"holder_path": PATH}, "frame main(): losses[*]"),
        ({"holder": "as read", "holder_path": PATH}, "as read"),
        ({"holder": "", "holder_path": PATH}, ""),
        ({"holder": "as read"}, "as read"),
        ({}, None),
    ],
)
def test_a_holder_s_words_are_made_of_its_path_where_they_are_not_given(
    given: dict[str, Any], holder: str | None
) -> None:
    assert HeldHere(device="cpu", count=1, bytes=1, **given).holder == holder


def test_what_an_older_client_and_process_leave_out() -> None:
    assert msgspec.json.decode(b'{"within_s": 2.5}', type=Question) == Question(within_s=2.5, follow=False)
    answer = msgspec.json.decode(b'{"pid": 7}', type=Answer)
    assert msgspec.to_builtins(answer) == {
        "pid": 7, "rank": None, "host": "", "argv": [], "time": None, "run_id": None, "step": None,
        "microbatch": None, "doing": None, "waited_s": 0.0, "paused_s": 0.0, "took_s": 0.0,
        "ledgers": [], "holders": [], "objects": 0, "nodes": 0, "notes": [],
        "groups": [], "details": [], "refused": None,
        "incomplete": [],
    }  # fmt: skip
