"""Classes of mappings, from the text of `smaps`: each line is one that Linux or glibc writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.observe.smaps import (
    MappingClass,
    MemoryClasses,
    MemoryMapping,
    parse_smaps,
    tmpfs_devices,
)

ARENA = 64 << 20


def entry(
    name: str,
    permissions: str = "rw-p",
    start: int = 0x7F0000001000,
    size: int = 0x1000,
    *,
    device: str = "08:01",
    inode: int = 0,
    rss: int = 4,
    anonymous: int = 0,
) -> str:
    """An entry with the fields that are read, and one that is not; KiB."""
    return (
        f"{start:x}-{start + size:x} {permissions} 00000000 {device} {inode}          {name}\n"
        f"Size:                {size >> 10} kB\nRss:                 {rss} kB\n"
        f"Anonymous:           {anonymous} kB\nVmFlags: rd wr mr mw me ac\n"
    )


def kind(*entries: str, tmpfs: frozenset[str] = frozenset()) -> MappingClass:
    return parse_smaps("".join(entries), tmpfs).mappings[0].kind


@pytest.mark.parametrize(
    ("name", "permissions", "expected"),
    [
        ("", "rw-p", "anonymous"),
        ("[anon: some name]", "rw-p", "anonymous"),
        ("[heap]", "rw-p", "heap"),
        ("[anon: glibc: malloc arena]", "rw-p", "heap"),
        ("[stack]", "rw-p", "stack"),
        ("[anon: glibc: pthread stack: 4711]", "rw-p", "stack"),
        ("[vdso]", "r-xp", "other"),
        ("/dev/zero (deleted)", "rw-s", "shared anonymous"),
        ("/dev/zero", "rw-p", "anonymous"),
        ("/dev/shm/torch_1_2", "rw-s", "shared"),
        ("/memfd:x (deleted)", "rw-s", "shared"),
        ("/SYSV00000000 (deleted)", "rw-s", "shared"),
        ("[anon_shmem:x]", "rw-s", "shared"),
        ("/dev/nvidia0", "rw-s", "device"),
        ("anon_inode:[perf]", "rw-s", "device"),
        ("/dev/hugepages/x", "rw-s", "file"),
        ("/data/train.bin", "r--s", "file"),
        ("/usr/lib/libc.so.6", "r--p", "library"),
        ("/usr/lib/libx.so", "r--p", "library"),
        ("/usr/lib/libx.so (deleted)", "r--p", "library"),
        ("/data/notes.sorted", "r--p", "file"),
    ],
)
def test_a_mapping_is_told_by_its_name(name: str, permissions: str, expected: MappingClass) -> None:
    assert kind(entry(name, permissions, inode=5 if name.startswith("/") else 0)) == expected


def test_all_mappings_of_a_program_are_library() -> None:
    data = entry("/opt/train", "r--p", inode=7)
    code = entry("/opt/train", "r-xp", inode=7)
    assert kind(data, code) == "library"
    assert kind(data, entry("/opt/other", "r-xp", inode=8)) == "file"
    assert kind(data, entry("/opt/other", "r-xp", device="08:02", inode=7)) == "file"
    assert kind(entry("", "rw-p"), entry("", "r-xp")) == "anonymous"


def test_files_on_a_tmpfs_are_shared_memory_wherever_it_is_mounted() -> None:
    one = entry("/mnt/ram/x", "rw-s", device="00:1b", inode=5)
    assert kind(one) == "file"
    assert kind(one, tmpfs=frozenset({"00:1b"})) == "shared"


@pytest.mark.parametrize(
    ("start", "name", "permissions", "reserve_at", "reserve_to", "reserve", "expected"),
    [
        pytest.param(ARENA, "", "rw-p", 0, ARENA, "---p", "heap", id="an arena"),
        pytest.param(ARENA + 4096, "", "rw-p", 0, ARENA - 4096, "---p", "anonymous", id="not aligned"),
        pytest.param(ARENA, "[anon: x]", "rw-p", 0, ARENA, "---p", "anonymous", id="named"),
        pytest.param(ARENA, "", "r--p", 0, ARENA, "---p", "anonymous", id="not writable"),
        pytest.param(ARENA, "", "rw-p", 4096, ARENA, "---p", "anonymous", id="a gap before what is reserved"),
        pytest.param(ARENA, "", "rw-p", 0, ARENA - 4096, "---p", "anonymous", id="reserved to elsewhere"),
        pytest.param(ARENA, "", "rw-p", 0, ARENA, "rw-p", "anonymous", id="nothing reserved"),
        pytest.param(
            ARENA, "", "rw-p", 0, 2 * ARENA, "---p", "anonymous", id="more reserved than an arena has"
        ),
    ],
)
def test_an_arena_of_a_thread_is_heap(
    start: int,
    name: str,
    permissions: str,
    reserve_at: int,
    reserve_to: int,
    reserve: str,
    expected: MappingClass,
) -> None:
    opened = 0x21000
    rest = start + opened + reserve_at
    following = entry("", reserve, rest, start + reserve_to - rest, rss=0)
    assert kind(entry(name, permissions, start, opened), following) == expected
    assert kind(entry("", "rw-p", ARENA, opened)) == "anonymous"


@pytest.fixture
def classes() -> MemoryClasses:
    return parse_smaps(
        entry("", start=0x1000, size=0x2000, rss=8, anonymous=8)
        + entry("[heap]", start=0x3000, size=0x1000, rss=4, anonymous=4)
        + entry("/data/train set.bin", "r--p", start=0x9000, size=0x3000, inode=5, rss=12, anonymous=4)
        + entry("", start=0x20000, size=0x1000, rss=1)
    )


def test_figures_are_kibibytes_and_classes_sum_to_the_whole(classes: MemoryClasses) -> None:
    assert classes.total == 25 << 10
    assert (classes.resident("anonymous"), classes.copied("anonymous")) == (9 << 10, 8 << 10)
    assert (classes.resident("file"), classes.copied("file")) == (12 << 10, 4 << 10)
    assert classes.resident("device") == 0
    first = classes.mappings[0]
    assert (first.start, first.end, first.rss, first.anonymous) == (0x1000, 0x3000, 8 << 10, 8 << 10)
    assert classes.mappings[2].name == "/data/train set.bin"
    assert parse_smaps("").total == 0


def test_devices_of_memory_backed_file_systems_are_hexadecimal() -> None:
    mounts = (
        "22 1 0:27 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=64k\n"
        "23 1 8:17 / /data rw - ext4 /dev/sdb1 rw\n"
        "24 1 259:300 / /mnt/ram rw shared:7 - ramfs ram rw\n"
    )
    assert tmpfs_devices(mounts) == {"00:1b", "103:12c"}
    assert tmpfs_devices("") == frozenset()


@st.composite
def address_spaces(draw: st.DrawFn) -> MemoryClasses:
    at = 0
    mappings = []
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=8)):
        mappings.append(MemoryMapping(at + gap, at + gap + size, "anonymous", size, 0, ""))
        at += gap + size
    return MemoryClasses(sum(mapping.rss for mapping in mappings), tuple(mappings))


@given(classes=address_spaces(), start=st.integers(0, 130), size=st.integers(0, 60))
def test_covering_yields_every_mapped_byte_of_the_range_once(
    classes: MemoryClasses, start: int, size: int
) -> None:
    covered = [byte for low, high, _ in classes.covering(start, start + size) for byte in range(low, high)]
    mapped = [byte for mapping in classes.mappings for byte in range(mapping.start, mapping.end)]
    assert covered == [byte for byte in mapped if start <= byte < start + size]
    for low, high, mapping in classes.covering(start, start + size):
        assert mapping.start <= low < high <= mapping.end
