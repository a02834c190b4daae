"""A job of another build is refused in one line, which names its interpreter."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from memtriage.outside import census
from memtriage.outside.memory import OtherBuildError, OutsideError, read_maps
from memtriage.outside.same_build import SharedFiles
from support.jobs import job_of


@pytest.fixture
def job() -> Iterator[int]:
    """A process with this Python, and without torch."""
    with job_of("print('ready', flush=True); input()") as process:
        yield process.pid


def _line(error: pytest.ExceptionInfo[OtherBuildError]) -> str:
    assert error.value.python is not None and os.path.exists(error.value.python)
    text = str(error.value)
    assert "\n" not in text and f"{error.value.python} -m memtriage" in text
    return text


def test_addresses_of_files_are_translated_and_others_are_not(job: int) -> None:
    files, own = SharedFiles(job, read_maps(job)), read_maps(os.getpid())
    there = files.theirs(id(object))
    assert there is not None
    assert files.theirs(id(list)) == there + id(list) - id(object)
    mapped = {mapping.path for mapping in read_maps(job)}
    ends = [
        before.end
        for before, after in itertools.pairwise(own)
        if before.path.startswith("/") and before.path in mapped and before.end < after.start
    ]
    assert ends  # nothing is mapped where these files end
    assert [files.theirs(end) for end in ends] == [None] * len(ends)
    assert [files.theirs(end - 1) is None for end in ends] == [False] * len(ends)
    assert files.theirs(own[0].start - 1) is None


def test_another_build_of_torch(job: int) -> None:
    files = SharedFiles(job, read_maps(job))
    own = files.own_files("libtorch_cpu")
    assert own and torch.__file__
    with pytest.raises(OtherBuildError) as error:
        files.require(own, "torch")
    assert "has another build of torch than this Python (libtorch_cpu" in _line(error)


def test_another_build_of_python(job: int) -> None:
    theirs = [mapping for mapping in read_maps(job) if "python" not in os.path.basename(mapping.path)]
    with pytest.raises(OutsideError, match=f"no Python was found in process {job}"):
        SharedFiles(job, theirs)


def test_a_reader_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "_has_torch", lambda: False)
    with pytest.raises(OtherBuildError) as error:
        census.take_census(os.getpid())
    assert "this Python has no torch" in _line(error)


def test_a_job_without_torch(job: int) -> None:
    with pytest.raises(OutsideError, match=f"process {job} has not loaded torch"):
        census.take_census(job)
