"""Descriptors of the watch: never used or closed once they have become the program's."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from memtriage.process.descriptors import Descriptor, close_socket, identity_of, own_socket


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


def test_own_descriptors_have_high_numbers_and_are_not_inherited(tmp_path: Path) -> None:
    number = os.open(tmp_path / "own", os.O_WRONLY | os.O_CREAT)
    own = Descriptor(number)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1024 if soft == resource.RLIM_INFINITY else min(soft, 1024)
    assert own.number >= max(limit - 64, limit // 2)
    assert identity_of(number) is None and not os.get_inheritable(own.number)
    own.close()
    assert identity_of(own.number) is None
    own.close()


@pytest.mark.parametrize("limit", [96, 600, 4096])
def test_a_low_limit_leaves_the_lower_half_to_the_program(tmp_path: Path, limit: int) -> None:
    code = (
        "import os, resource, sys\n"
        "from memtriage.process.descriptors import Descriptor\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
        "print(Descriptor(os.open(sys.argv[1], os.O_RDONLY)).number)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == {96: 48, 600: 536, 4096: 960}[limit]


def test_two_descriptors_of_one_file_know_each_other(tmp_path: Path) -> None:
    def opened(name: str) -> Descriptor:
        return Descriptor(os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT))

    first, second, other = opened("one"), opened("one"), opened("two")
    assert first.is_same_file(second) and not first.is_same_file(other)
    first.close()
    assert not first.is_same_file(second) and not first.ours
    second.close()
    other.close()


def test_a_socket_of_ones_own_is_closed_unless_it_became_another_file() -> None:
    made, descriptor = own_socket(socket.socket())
    assert made.fileno() == descriptor.number and descriptor.ours
    close_socket(made, descriptor)
    assert made.fileno() == -1 and identity_of(descriptor.number) is None
