"""Programs that a watch could harm, run as they are and watched: the same output, status, files and state."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from memtriage.store.reader import read_run
from support.side_by_side import make_folder, run, run_both


@pytest.mark.parametrize(
    "name",
    [
        "leaking_modes",
        "descriptors_and_threads",
        "exceptions_from_outside",
        "children",
        "limits",
        "no_training",
        "foreign_objects",
        "settings",
        "frames",
    ],
)
def test_a_program_that_trains(tmp_path: Path, name: str) -> None:
    plain, watched = run_both(tmp_path, f"{name}.py")
    assert plain.status == 0
    assert watched == plain
    (rank,) = read_run([tmp_path / "record"]).ranks
    if name == "limits":
        return  # of the size of files: the record ends there
    failed = [note for note in rank.notes if "could not do all of its work" in note and name != "frames"]
    assert rank.end is not None and not failed, rank.notes


@pytest.mark.parametrize(
    "name", ["leaking_modes", "descriptors_and_threads", "exceptions_from_outside", "frames", "settings"]
)
def test_a_program_that_is_asked_all_the_time(tmp_path: Path, name: str) -> None:
    """Copies of it take the censuses."""
    plain, watched = run_both(tmp_path, f"{name}.py", options=["--listen"])
    assert watched.answers > 0 or name == "descriptors_and_threads"  # which closes the socket
    assert (plain.status, watched) == (0, plain)


def test_a_program_that_waits_for_signals_and_becomes_another(tmp_path: Path) -> None:
    plain, watched = run_both(tmp_path, "signals.py")
    assert plain.status == 9
    assert watched == plain


def test_a_program_without_torch(tmp_path: Path) -> None:
    plain, watched = run_both(tmp_path, "without_torch.py")
    assert plain.status == 21 and "asked" not in plain.stdout
    assert watched == plain
    assert read_run([tmp_path / "record"]).ranks[0].end is not None


@pytest.mark.parametrize("name", ["torch", "memtriage"])
def test_another_module_of_this_name_beside_the_script(tmp_path: Path, name: str) -> None:
    text = f"import {name}\nprint({name}.WHOSE)\nraise SystemExit(4)\n"
    files = {f"own/{name}.py": "WHOSE = 'mine'\n", "own/script.py": text}
    plain, watched = run_both(tmp_path, "own/script.py", files=files)
    assert plain.status == 4 and plain.stdout == "mine\n"
    assert watched == plain


SHADOWS = {"rich.py": "WHOSE = 'mine'\nprint('my rich')\n", "queue.py": "WHOSE = 'mine'\n"}


def test_modules_of_libraries_names_beside_the_script(tmp_path: Path) -> None:
    plain, watched = run_both(tmp_path, "interpreter.py", files=SHADOWS)
    assert plain.status == 7 and plain.stdout.count("my rich") == 1
    assert watched == plain
    assert read_run([tmp_path / "record"]).ranks[0].end is not None


SMALL = "import sys\nprint(__name__, sys.argv[1:], sys.path[0] == '', __spec__ and __spec__.name)\n"


def zipped() -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("__main__.py", SMALL)
    return whole.getvalue()


@pytest.mark.parametrize(
    "arguments",
    [
        ("program.zip", "a"),
        ("package", "-x"),
        ("-m", "package", "b"),
        ("-m", "package.part"),
        ("-m", "trace", "--count", "--summary", "-C", "counts", "small.py"),
        ("-m", "coverage", "run", "small.py"),
    ],
)
def test_every_way_to_start(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    files: dict[str, str | bytes] = {
        "program.zip": zipped(),
        "package/__init__.py": "",
        "package/__main__.py": SMALL,
        "package/part.py": SMALL,
        "small.py": SMALL,
    }
    plain, watched = run_both(tmp_path, *arguments, files=files)
    assert (watched.status, watched.stdout) == (plain.status, plain.stdout)
    assert plain.status == 0 and set(watched.files) == set(plain.files)


FLAGS = """
import sys, warnings
print(sys.flags, sys.warnoptions, sys._xoptions, __debug__, sys.argv, sys.path[:2])
print([each for each in warnings.filters if "numpy" not in str(each)])
print(sys.stdout.write_through, sys.dont_write_bytecode, "site" in sys.modules)
warnings.warn("an error with -W error")
"""


@pytest.mark.parametrize(
    "flags", ["-I", "-E -s -P -u", "-S -B", "-O -bb", "-X dev -W error", "-X utf8 -X importtime -W ignore"]
)
def test_flags_of_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    if "-S" in flags:  # nothing else says where memtriage is
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    plain, watched = run_both(tmp_path, "flags.py", files={"flags.py": FLAGS}, flags=flags.split())
    for outcome, folder in ((plain, "plain"), (watched, "watched")):
        outcome.stdout = outcome.stdout.replace(str(tmp_path / folder), "folder")
    assert watched == plain
    assert plain.stdout.startswith("sys.flags(") and (plain.status == 1) == ("error" in flags)


def test_a_script_from_standard_input(tmp_path: Path) -> None:
    script = b"print('read'); raise SystemExit(5)"
    left = []
    for name, record in (("plain", None), ("watched", tmp_path / "record")):
        with (tmp_path / name).open("wb+") as file:
            file.write(script)
            file.seek(0)
            left.append(run(["/dev/stdin"], make_folder(tmp_path / f"in-{name}"), record, stdin=file))
    assert left[0] == left[1] and left[0].status == 5


@pytest.mark.parametrize(
    "text", ["raise ValueError(1)", "import sys; sys.exit('text')", "import os; os._exit(9)"]
)
def test_ends(tmp_path: Path, text: str) -> None:
    plain, watched = run_both(tmp_path, "end.py", files={"end.py": f"print('begins', flush=True)\n{text}\n"})
    assert watched == plain


def test_in_a_directory_that_was_removed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(3)")
    (tmp_path / "gone").mkdir()
    shell = "cd gone; rmdir ../gone; $0 $1/script.py; echo $?; "
    watched = "$0 -m memtriage run -o $1/record $1/script.py; echo $?"
    done = subprocess.run(
        ["sh", "-c", shell + watched, sys.executable, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["3", "3"]


def test_pytest_with_xdist(tmp_path: Path) -> None:
    tests = "import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test(n): assert n != 2\n"
    arguments = ("-m", "pytest", "-n", "2", "-q", "--no-header", "-p", "no:cacheprovider", "test_small.py")
    plain, watched = run_both(
        tmp_path, *arguments, files={"test_small.py": tests, "pytest.ini": "[pytest]\n"}
    )
    assert plain.status == watched.status == 1
    assert "1 failed, 3 passed" in plain.stdout and "1 failed, 3 passed" in watched.stdout


def test_ranks_that_never_began_are_hardly_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    plain, watched = run_both(tmp_path, "end.py", files={"end.py": "print('ended')"})
    assert watched == plain
