"""A job that is read does not run, gets no signal, keeps every byte, and none of its values is reported."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from memtriage.outside.census import take_census
from memtriage.outside.memory import ProcessMemory, read_maps
from memtriage.outside.python_layout import layout_of
from support.jobs import job_of

pytestmark = pytest.mark.skipif(
    layout_of(sys.version_info[:2]) is None, reason="reading from outside does not know this Python"
)

_JOB = """
import sys, torch
class Account:
    def __init__(self):
        self.secret = "correct horse battery staple"
        self.kept = [torch.full((1000,), 4711.25)]
accounts = {"main": [Account()], "numbers": [31415926535]}
def wait(secret="tr0ub4dor"):
    inner = torch.zeros(500)
    print("ready", flush=True)
    sys.stdin.readline()
wait()
"""
_COUNTS = re.compile(r"^(voluntary_ctxt_switches|nonvoluntary_ctxt_switches|SigPnd|ShdPnd|State):.*$", re.M)


@pytest.fixture
def job() -> Iterator[int]:
    with job_of(_JOB) as process:
        state = Path(f"/proc/{process.pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "S":
            pass  # it is on its way into `readline`
        yield process.pid


def _image(pid: int) -> dict[int, str]:
    """The digest of each writable range of a process."""
    memory = ProcessMemory(pid)
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    writable = {int(line.partition("-")[0], 16) for line in lines if line.split()[1].startswith("rw")}
    images = {}
    for mapping in read_maps(pid):
        if mapping.start in writable and mapping.readable:
            size = mapping.end - mapping.start
            images[mapping.start] = hashlib.sha1(memory.text_bytes(mapping.start, size)).hexdigest()
    return images


def _ran(pid: int) -> tuple[list[str], list[str]]:
    """What the kernel says of whether a process ran: switches, signals, times and faults."""
    counts = _COUNTS.findall(Path(f"/proc/{pid}/status").read_text())
    text = [line.group(0) for line in _COUNTS.finditer(Path(f"/proc/{pid}/status").read_text())]
    assert len(counts) == len(text) == 5
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return text, fields[11:15]  # user's and system's time, of it and its children


def test_a_census_changes_nothing_and_tells_no_values(job: int) -> None:
    before, image = _ran(job), _image(job)
    found = take_census(job, within_s=600)
    assert _ran(job) == before
    assert _image(job) == image
    assert {storage.holder for storage in found.storages} >= {
        "__main__.accounts['main'][*].kept[*]",
        "frame wait(): inner",
    }
    said = repr((found.groups, found.storages, found.details, found.notes))
    for value in ("correct horse", "tr0ub4dor", "4711", "31415926535"):
        assert value not in said


def test_a_stop_leaves_a_job_that_waits_as_it_was(job: int) -> None:
    image = _image(job)
    found = take_census(job, pause=True, within_s=600)
    assert found.stopped_s > 0
    assert _image(job).keys() == image.keys()
    assert Path(f"/proc/{job}/stat").read_text().rpartition(")")[2].split()[0] in "SR"
