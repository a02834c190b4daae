"""The facts of `memtriage doctor` on a terminal."""

from __future__ import annotations

from memtriage.model.machine import Fact
from memtriage.report.machine_text import render
from support.printed import printed

FACTS = [
    Fact(section="versions", name="python", value="3.11.7"),
    Fact(section="versions", name="torch", value="2.11.0", status="note", advice="2.14 needs less"),
    Fact(section="limits", name="/dev/shm", value="64 MiB", status="bad", advice="docker run --shm-size=8g"),
]
TEXT = """\
versions
  python                           3.11.7
  torch                            2.11.0
                                   -> 2.14 needs less

limits
  /dev/shm                         64 MiB
                                   !! docker run --shm-size=8g

1 to change
"""


def test_the_whole_text() -> None:
    assert printed(render, FACTS) == TEXT


def test_what_should_be_changed_is_counted() -> None:
    assert printed(render, FACTS[:2]).endswith("\n\nnothing to change\n")
    assert printed(render, [FACTS[2], FACTS[2]]).endswith("\n\n2 to change\n")


def test_each_status_has_its_style() -> None:
    text = printed(render, FACTS, colors=True)
    assert "\x1b[33m2.11.0" in text and "\x1b[1;31m64 MiB" in text and "\x1b[1mlimits" in text
    assert "\x1b[1;31m1 to change" in text
    fine = printed(render, FACTS[:2], colors=True)
    assert "\x1b[32m" in fine or "\x1b[1;32m" in fine
