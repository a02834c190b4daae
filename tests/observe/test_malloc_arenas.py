"""malloc arena by arena: read from glibc's own XML, and true of what a trim gives back."""

from __future__ import annotations

import subprocess
import sys

import pytest

from memtriage.observe.malloc import malloc_info
from memtriage.observe.malloc_arenas import malloc_arenas, parse_arenas

PAGE = 4096
XML = b"""<malloc version="1">
<heap nr="0">
<sizes>
  <size from="17" to="32" total="64" count="2"/>
  <size from="33" to="33" total="99" count="3"/>
  <size from="65553" to="131089" total="200000" count="2"/>
  <unsorted from="1025" to="8193" total="9218" count="2"/>
</sizes>
<total type="fast" count="2" size="64"/>
<total type="rest" count="8" size="310000"/>
<system type="current" size="1081344"/>
<system type="max" size="1081344"/>
<aspace type="total" size="1081344"/>
<aspace type="mprotect" size="1081344"/>
</heap>
<heap nr="1">
<sizes>
</sizes>
<total type="fast" count="0" size="0"/>
<total type="rest" count="1" size="3000"/>
<system type="current" size="135168"/>
</heap>
<total type="fast" count="2" size="64"/>
<total type="rest" count="9" size="313000"/>
<total type="mmap" count="0" size="0"/>
</malloc>
"""


def test_each_arena_with_what_is_free() -> None:
    assert [arena.free for arena in parse_arenas(XML, PAGE)] == [310_064, 3000]


def test_only_whole_pages_can_be_trimmed() -> None:
    """Of the large bin two pages are lost, of the unsorted one two, of the top one and its least size."""
    main, thread = parse_arenas(XML, PAGE)
    top = 310_000 - (99 + 200_000 + 9_218)
    assert main.trimmable == (200_000 - 2 * PAGE) + (9_218 - 2 * PAGE) + (top - PAGE - 32)
    assert thread.trimmable == 0


@pytest.mark.parametrize("text", [b"", b"<malloc", b"<other/>"])
def test_what_is_no_such_text_has_no_arenas(text: bytes) -> None:
    assert parse_arenas(text, PAGE) == ()


TRIM = """
import ctypes
from memtriage.observe.host import memory_classes
from memtriage.observe.malloc_arenas import malloc_arenas
blocks = [bytearray(b"x") * (70_000 if i % 3 else 400) for i in range(1500)]
kept = blocks[::7]
del blocks
memory_classes()
before = memory_classes().total
told = sum(arena.trimmable for arena in malloc_arenas())
ctypes.CDLL(None).malloc_trim(0)
print(told, before - memory_classes().total)
"""


@pytest.mark.skipif(malloc_info() is None, reason="malloc is not glibc's")
def test_what_is_told_is_what_a_trim_returns() -> None:
    done = subprocess.run([sys.executable, "-c", TRIM], capture_output=True, text=True, check=True)
    told, returned = map(int, done.stdout.split())
    assert returned > 40_000_000
    assert abs(told - returned) < 0.05 * returned


@pytest.mark.skipif(malloc_info() is None, reason="malloc is not glibc's")
def test_arenas_and_counters_agree() -> None:
    arenas, counters = malloc_arenas(), malloc_info()
    assert counters is not None
    assert sum(arena.free for arena in arenas) == pytest.approx(counters.free, rel=0.2, abs=4 << 20)
