"""How much machine code was generated at run time."""

from __future__ import annotations

import builtins
import mmap
import sys

import pytest

from memtriage.observe.generated_code import generated_code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_only_writable_and_executable_memory_counts() -> None:
    before = generated_code()
    assert before is not None
    data = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    assert generated_code() == before
    try:
        code = mmap.mmap(
            -1,
            1 << 20,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC,
        )
    except PermissionError:
        pytest.skip("this machine allows no memory that is writable and executable")
    try:
        assert generated_code() == before + (1 << 20)
    finally:
        code.close()
        data.close()
    assert generated_code() == before


def test_it_is_read_without_the_programs_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise SystemExit("called by the watch")

    monkeypatch.setattr(builtins, "open", refuse)
    assert generated_code() is not None
