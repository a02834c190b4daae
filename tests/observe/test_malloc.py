"""malloc's counters must follow what is allocated, and say nothing when malloc is not glibc's."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memtriage.observe import malloc
from memtriage.observe.host import resident
from memtriage.observe.malloc import has_own_mapping, malloc_info, parse_arenas, python_arenas, trim
from support.own_process import printed_by

MIB = 1 << 20
needs_glibc = pytest.mark.skipif(malloc_info() is None, reason="no glibc 2.33 whose malloc is in use")


@pytest.fixture
def fresh_lookup() -> Iterator[None]:
    malloc._mallinfo2.cache_clear()
    yield
    malloc._mallinfo2.cache_clear()


@needs_glibc
def test_a_large_block_is_in_use_and_mapped_until_freed() -> None:
    # In a process of its own: malloc may hold free memory here that is large enough.
    script = (
        "from memtriage.observe.malloc import malloc_info\n"
        "def show(info): print(info.in_use, info.mapped, info.from_kernel)\n"
        "show(malloc_info())\n"
        "block = bytearray(64 << 20)\n"  # above the highest mmap threshold (32 MiB): a mapping of its own
        "show(malloc_info())\n"
        "del block\n"
        "show(malloc_info())\n"
    )
    printed = printed_by(script)
    before, during, after = printed[:3], printed[3:6], printed[6:]
    assert all(64 * MIB <= more - less < 65 * MIB for more, less in zip(during, before, strict=True))
    assert after[1] == before[1]


@needs_glibc
def test_what_the_kernel_gave_is_in_use_or_free() -> None:
    info = malloc_info()
    assert info
    assert info.in_use + info.free == info.from_kernel
    assert info.mapped <= info.in_use


@needs_glibc
def test_a_freed_block_under_a_living_one_is_free_not_in_use() -> None:
    script = (
        "from memtriage.observe.malloc import malloc_info\n"
        "blocks = [bytearray(100_000) for _ in range(400)]\n"
        "before = malloc_info()\n"
        "del blocks[:-1]\n"
        "after = malloc_info()\n"
        "print(before.in_use - after.in_use, after.free - before.free)\n"
    )
    given_back, newly_free = printed_by(script)
    assert 39_900_000 <= given_back < 40_100_000
    assert 39_900_000 <= newly_free < 40_100_000


@needs_glibc
def test_trimming_gives_free_pages_back_to_the_kernel() -> None:
    script = (
        "from memtriage.observe.host import host_sample\n"
        "from memtriage.observe.malloc import trim\n"
        "blocks = [bytearray(b'1' * 100_000) for _ in range(400)]\n"
        "del blocks[:-1]\n"
        "before = host_sample().rss\n"
        "print(int(trim()), before - host_sample().rss)\n"
    )
    trimmed, given_back = printed_by(script)
    assert trimmed == 1 and given_back > 30_000_000


def test_without_glibc_nothing_is_trimmed(monkeypatch: pytest.MonkeyPatch, fresh_lookup: None) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert trim() is False


def test_none_when_mallinfo2_is_not_glibcs(monkeypatch: pytest.MonkeyPatch, fresh_lookup: None) -> None:
    homes = {"mallinfo2": 1, "gnu_get_libc_version": 2}
    monkeypatch.setattr(malloc, "_object_of", lambda libc, symbol: homes[symbol])
    assert malloc_info() is None


@needs_glibc
def test_the_first_call_leaves_nothing_behind(fresh_lookup: None) -> None:
    before = malloc_info()
    malloc._mallinfo2.cache_clear()
    after = malloc_info()
    assert before and after
    assert after.in_use - before.in_use < MIB
    assert after.mapped == before.mapped


def test_none_off_linux(monkeypatch: pytest.MonkeyPatch, fresh_lookup: None) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert malloc_info() is None
    assert python_arenas() is None


BUMP_ALLOCATOR = """
#include <stddef.h>
#include <string.h>
static char pool[1u << 30] __attribute__((aligned(64)));
static size_t used;
static void *take(size_t n) {
    n = (n + 127) & ~(size_t)63;
    size_t at = __sync_fetch_and_add(&used, n);
    *(size_t *)(pool + at + 48) = n - 64;
    return pool + at + 64;
}
void *malloc(size_t n) { return take(n); }
void free(void *p) { }
void *calloc(size_t a, size_t b) { return take(a * b); }
void *realloc(void *p, size_t n) {
    void *fresh = take(n);
    if (p) { size_t old = *(size_t *)((char *)p - 16); memcpy(fresh, p, old < n ? old : n); }
    return fresh;
}
"""
WRAPPER = """
#include <stddef.h>
extern void *__libc_malloc(size_t);
void *malloc(size_t n) { return __libc_malloc(n); }
"""


def preload(folder: Path, source: str) -> str:
    """What `malloc_info()` prints in a Python with this source as a preloaded library."""
    (folder / "other.c").write_text(source)
    library = folder / "other.so"
    subprocess.run(
        ["cc", "-O1", "-fno-builtin", "-shared", "-fPIC", "-o", str(library), str(folder / "other.c")],
        check=True,
    )
    script = "from memtriage.observe.malloc import malloc_info; print(malloc_info())"
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@needs_glibc
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_none_when_another_malloc_is_preloaded(tmp_path: Path) -> None:
    assert preload(tmp_path, BUMP_ALLOCATOR) == "None"


@needs_glibc
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_preloaded_wrapper_of_glibc_malloc_changes_nothing(tmp_path: Path) -> None:
    preloaded = preload(tmp_path, WRAPPER)
    assert preloaded.startswith("MallocInfo(")


def test_arena_line_is_read() -> None:
    text = b"# arenas allocated current = 82\n82 arenas * 1048576 bytes/arena     =           85,983,232\n"
    assert parse_arenas(text) == 82 * MIB
    assert parse_arenas(b"no such line") is None


def test_python_arenas_grow_with_small_objects() -> None:
    if python_arenas() is None:
        pytest.skip("this Python does not tell")
    # A process of its own: in this one, arenas that earlier tests emptied would be filled first.
    code = (
        "from memtriage.observe.malloc import python_arenas as arenas; before = arenas(); "
        "objects = [object() for _ in range(1_000_000)]; print(arenas() - before, arenas())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, after = map(int, done.stdout.split())
    assert grown >= 8 * MIB  # 16 bytes each
    assert after % MIB == 0


def test_python_hands_out_what_small_objects_take() -> None:
    if python_arenas() is None:
        pytest.skip("this Python does not say")
    script = (
        "from memtriage.observe.malloc import python_in_use\n"
        "before = python_in_use()\n"
        "kept = [number + 0.5 for number in range(100_000)]\n"
        "print(python_in_use() - before)\n"
        "kept.clear()\n"
        "print(python_in_use() - before)\n"
    )
    kept, left = printed_by(script)
    assert kept == pytest.approx(100_000 * 32, rel=0.02)  # floats of 24 bytes, in units of 16
    assert abs(left) < 64 * 1024


def test_python_arenas_unknown_without_pymalloc() -> None:
    script = "from memtriage.observe.malloc import python_arenas; print(python_arenas())"
    printed = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONMALLOC": "malloc"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.strip() == "None"


@needs_glibc
def test_blocks_of_malloc_are_told_from_other_mappings() -> None:
    script = (
        "import ctypes, mmap\n"
        "from memtriage.observe.malloc import has_own_mapping\n"
        "malloc = ctypes.CDLL(None).malloc\n"
        "malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]\n"
        "large = 40 << 20\n"  # above malloc's highest threshold, so a mapping of its own
        "mapped = mmap.mmap(-1, large, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))\n"
        "for block, nbytes in ((malloc(large), large), (malloc(1000), 1000), (address, large)):\n"
        "    print(int(has_own_mapping(block, nbytes)))\n"
    )
    assert printed_by(script) == [True, False, False]


@pytest.mark.parametrize(
    ("address", "padding", "length"),
    [
        pytest.param(0x7FE0AC778010, 0, 0x2801002, id="glibc 2.36"),
        pytest.param(0x7FE0A2E74000, 0xFF0, 0x2801012, id="glibc 2.36, aligned"),
        pytest.param(0x7F5F0B0B3010, 0, 0x2800FF2, id="glibc 2.43"),
        pytest.param(0x7F5F017AF000, 0xFF0, 0x2801002, id="glibc 2.43, aligned"),
    ],
)
def test_chunks_with_a_mapping_of_their_own_in_versions_of_glibc(
    address: int, padding: int, length: int
) -> None:
    """As measured for 40 MiB, on pages of 4 KiB."""
    if os.sysconf("SC_PAGE_SIZE") != 4096:
        pytest.skip("other pages")
    assert malloc._has_mapping(address, 40 << 20, padding, length)
    assert not malloc._has_mapping(address, 41 << 20, padding, length)
    assert not malloc._has_mapping(address, 40 << 20, padding, length & ~2)


@pytest.mark.parametrize("address", [16, 4096, 1 << 46, 1 << 63])
def test_an_address_where_nothing_is_mapped_is_no_block(address: int) -> None:
    assert has_own_mapping(address, 100) in (False, None)


def address_of(memory: bytearray | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_asking_brings_no_page_in() -> None:
    """The page in front of an untouched tensor may be untouched memory of the same program."""
    mapped = mmap.mmap(-1, 40 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    middle = address_of(mapped) + (20 << 20)
    assert has_own_mapping(middle, 4096) in (False, None)
    assert resident(middle - 4096, 8192) in (0, None)
