"""Descriptors of the watch: never used or closed once they have become the program's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memtriage.process.descriptors import Descriptor


def test_a_descriptor_that_became_another_file_is_left_alone(tmp_path: Path) -> None:
    own = Descriptor(os.open(tmp_path / "own", os.O_WRONLY | os.O_CREAT))
    assert own.number > 255 and own.write(b"1") == 1
    os.close(own.number)
    with (tmp_path / "theirs").open("wb") as theirs:
        os.dup2(theirs.fileno(), own.number)
        assert not own.ours
        with pytest.raises(OSError, match="closed memtriage's descriptor"):
            own.write(b"2")
        own.close()
        os.write(own.number, b"3")  # still theirs
        os.close(own.number)
    assert (tmp_path / "own").read_bytes() == b"1" and (tmp_path / "theirs").read_bytes() == b"3"
