"""A disk without space: the program's own writes fail as they do unwatched, and the watch goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from support.side_by_side import make_folder, run

FILLS = """
import errno, mmap, os, shutil, sys

def attempt(name, write):
    try:
        write()
        print(name, "written")
    except OSError as error:
        print(name, errno.errorcode[error.errno])

def append():
    with open("own.txt", "a") as file:
        file.write("x" * 100_000)

def allocate():
    with open("allocated", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 100_000)

attempt("append", append)
attempt("allocate", allocate)
attempt("copy", lambda: shutil.copyfile(sys.executable, "copy"))
os.remove("filler")  # as one who comes and makes room
for name in ("own.txt", "allocated", "copy"):
    os.remove(name)
attempt("append", append)
print(os.path.getsize("own.txt"), flush=True)
raise SystemExit(5)
"""

LOGS = """
import errno

log = open("/dev/full", "wb", buffering=0)
failed = []
for number in range(3):
    try:
        log.write(b"loss")
    except OSError as error:
        failed.append(errno.errorcode[error.errno])
print(failed)
raise SystemExit(6)
"""


@pytest.fixture
def small_disks(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Two folders on disks of their own, of which only root can make any."""
    mounted = {}
    try:
        for name in ("plain", "watched"):
            folder = tmp_path / name
            folder.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", "size=512k", "memtriage-test", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
            mounted[name] = folder
        yield mounted
    finally:
        for folder in mounted.values():
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_program_and_its_record_on_a_full_disk(small_disks: dict[str, Path]) -> None:
    left = {}
    for name, disk in small_disks.items():
        work = make_folder(disk, files={"fills.py": FILLS, "filler": b""})
        with (work / "filler").open("ab", buffering=0) as filler, suppress(OSError):
            while filler.tell() < 1 << 20:
                filler.write(b"x" * 4096)
        left[name] = run(["fills.py"], work, disk / "record" if name == "watched" else None)
    assert left["watched"] == left["plain"]
    assert left["plain"].status == 5 and left["plain"].stdout.count("ENOSPC") == 3


def test_a_record_that_can_never_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("TORCHELASTIC_RUN_ID", "full")):
        monkeypatch.setenv(name, value)
    record = tmp_path / "record" / "full" / "0" / "rank-00000.jsonl"
    record.parent.mkdir(parents=True)
    record.symlink_to("/dev/full")
    work = make_folder(tmp_path, files={"logs.py": LOGS})
    plain = run(["logs.py"], work)
    with (tmp_path / "messages").open("w") as messages:
        watched = run(["logs.py"], work, tmp_path / "record", stderr=messages)
    assert watched == plain
    assert plain.status == 6 and plain.stdout.count("ENOSPC") == 3
    told = (tmp_path / "messages").read_text()
    assert told.count("No space left on device") == 2  # when it is met, and in the report
    assert "NOT JUDGED" in told
