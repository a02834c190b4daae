"""A standard error that cannot be written to: the program runs and ends as without a watch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.side_by_side import make_folder, run

SCRIPT = """
import os, signal, sys

if "dies" in sys.argv:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)

# So often that a file which the watch reads for an instant is not taken for it.
print(all(os.path.exists("/proc/self/fd/2") for _ in range(100_000)), flush=True)
raise SystemExit(3)
"""


def test_a_broken_pipe(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    work = make_folder(tmp_path, files={"tiny.py": SCRIPT})
    plain = run(["tiny.py"], work, stderr=writing)
    for options in ([], ["--listen"], ["--metrics", "0"]):
        assert run(["tiny.py"], work, tmp_path / "record", options, stderr=writing) == plain
    assert run(["tiny.py", "dies"], work, tmp_path / "record", stderr=writing) == plain
    os.close(writing)
    assert (plain.status, plain.stdout) == (3, "True\n")


def test_a_closed_one(tmp_path: Path) -> None:
    work = make_folder(tmp_path, files={"tiny.py": SCRIPT})
    plain = run(["tiny.py"], work, preexec_fn=lambda: os.close(2))
    assert run(["tiny.py"], work, tmp_path / "record", preexec_fn=lambda: os.close(2)) == plain


def test_a_full_disk(tmp_path: Path) -> None:
    work = make_folder(tmp_path, files={"tiny.py": SCRIPT})
    with open("/dev/full", "w") as full:
        plain = run(["tiny.py"], work, stderr=full)
        assert run(["tiny.py"], work, tmp_path / "record", stderr=full) == plain


@pytest.mark.parametrize("text", ["sys.stderr = None", "sys.stderr = open('own.txt', 'w')"])
def test_the_programs_own_stream_gets_nothing(tmp_path: Path, text: str) -> None:
    work = make_folder(tmp_path, files={"tiny.py": f"import sys\n{text}\nprint('ran')\n"})
    plain = run(["tiny.py"], work)
    watched = run(["tiny.py"], work, tmp_path / "record", stderr=subprocess.PIPE)
    assert watched == plain and plain.stdout == "ran\n"


def test_a_redirected_descriptor_gets_the_report(tmp_path: Path) -> None:
    text = "import os\nlog = open('log.txt', 'w')\nos.dup2(log.fileno(), 2)\n"
    work = make_folder(tmp_path, files={"tiny.py": text})
    watched = run(["tiny.py"], work, tmp_path / "record")
    assert watched.status == 0 and b"NOT JUDGED" in watched.files["log.txt"]
