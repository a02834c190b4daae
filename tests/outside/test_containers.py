"""Containers of ordinary data that grow in another process, by its memory alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from memtriage.model.paths import in_words
from memtriage.outside.python_layout import layout_of
from memtriage.session.outside_helper import ReadProcess
from memtriage.session.outside_reader import ReadRequest

pytestmark = pytest.mark.skipif(
    layout_of(sys.version_info[:2]) is None, reason="reading from outside does not know this Python"
)

SIDE, TEXT, MORE = 64, 5000, 50
SCRIPT = f"""
import collections, sys, torch, numpy as np

class Clips:
    def __init__(self):
        self.cache, self.seen, self.recent = {{}}, [], collections.deque(maxlen=4)
        self.failed = []

    def grow(self, first):
        for index in range(first, first + {MORE}):
            self.cache[index, index % 3] = np.zeros(({SIDE}, {SIDE}), np.float64) + index
            self.seen.append((index, bytes({TEXT})))
            self.recent.append(index)
            self.failed.append(None)

def main():
    clips = Clips()
    for turn, _ in enumerate(sys.stdin):
        clips.grow({MORE} * turn)
        print(turn, flush=True)

main()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / "clips.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, str(script)], stdin=-1, stdout=-1, text=True) as job:
        yield job
        job.kill()


def turn(job: subprocess.Popen[str]) -> None:
    """Let the job grow once."""
    assert job.stdin is not None and job.stdout is not None
    job.stdin.write("\n")
    job.stdin.flush()
    assert job.stdout.readline()


def test_what_grows_is_named_with_its_entries_their_size_and_the_line_that_stores(
    job: subprocess.Popen[str], tmp_path: Path
) -> None:
    turn(job)
    opened = os.open(f"/proc/{job.pid}/mem", os.O_RDONLY)
    followed = ReadProcess.of(ReadRequest(job.pid, str(tmp_path)), opened)
    assert followed.read().census.data == []  # type: ignore[union-attr]
    turn(job)
    second = followed.read().census
    turn(job)
    third = followed.read().census
    followed.reader.close()
    assert second is not None and third is not None
    found = {in_words(seen.path): seen for seen in second.data}
    cache, texts = found["frame main(): clips.cache[*]"], found["frame main(): clips.seen[*]"]
    assert (cache.entries, cache.before) == (2 * MORE, MORE)
    assert cache.entry_bytes == pytest.approx(SIDE * SIDE * 8, rel=0.02)
    assert cache.stored_at is not None and cache.stored_at.startswith("clips.py:11")
    assert texts.entry_bytes == pytest.approx(TEXT, rel=0.05) and texts.kind == "list"
    assert not [path for path in found if "recent" in path], "its bound is reached"
    assert found["frame main(): clips.failed[*]"].entry_bytes in (8, 9), (
        "a list's pointer to an object of all"
    )
    again = {in_words(seen.path): seen for seen in third.data}["frame main(): clips.cache[*]"]
    assert (again.id, again.entries, again.before) == (cache.id, 3 * MORE, None)
    assert third.position.time_s > second.position.time_s
