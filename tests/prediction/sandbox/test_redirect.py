"""With `open` and the functions of `os` replaced, programs see what they write and no file changes."""

import bz2
import errno
import functools
import glob
import importlib
import io
import lzma
import os
import shutil
import stat
import sys
import tarfile
import tempfile
import tokenize
from pathlib import Path

import pytest

from memtriage.prediction.sandbox import redirect
from memtriage.prediction.sandbox.copy_on_write import CopyOnWrite

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs POSIX")

LISTED = functools.partial(os.listdir)  # the function itself would be replaced, too


def tree(folder):
    """Every path below a folder, with its mode and what it holds."""
    return {
        path: (stat.filemode(path.lstat().st_mode), None if path.is_dir() else path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.exists()
    }


@pytest.fixture
def files(tmp_path):
    (tmp_path / "scratch").mkdir()
    return CopyOnWrite(str(tmp_path / "scratch"))


@pytest.fixture
def job(tmp_path, monkeypatch, files):
    """The working directory, whose files must not change, while the functions are replaced."""
    folder = tmp_path / "job"
    (folder / "runs/one").mkdir(parents=True)
    (folder / "runs/one/model.pt").write_text("weights")
    (folder / "log").write_text("first line\n")
    (folder / "log").chmod(0o640)
    (folder / "latest").symlink_to("runs/one")
    (folder / "dead").symlink_to("nowhere")
    monkeypatch.chdir(folder)
    before = tree(folder)
    functions = {id(value) for value in vars(os).values() if callable(value)} | {id(open)}
    kept = [
        (module, name, value)
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if id(value) in functions
    ]
    monkeypatch.setattr(shutil, "_use_fd_functions", shutil._use_fd_functions)
    redirect.install(files)
    try:
        yield folder
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
        importlib.reload(tempfile)
        os.chdir(folder)
    assert tree(folder) == before


def written(path, text="new"):
    Path(path).write_text(text)
    return path


def raised(function, *arguments, **options):
    """The error of a call, with the path that it names."""
    with pytest.raises(OSError) as caught:
        function(*arguments, **options)
    return errno.errorcode[caught.value.errno], caught.value.filename


def test_what_is_written_is_read_back_by_every_way(job):
    written("log", "second\n")
    with open("log", "a") as file:
        assert file.name == "log"
        file.write("third\n")
    assert read("log") == read(b"log") == Path("log").read_text() == "second\nthird\n"
    with io.FileIO(os.open("log", os.O_RDONLY)) as file:
        assert file.read() == b"second\nthird\n"
    assert io.open is open
    with open("made", "x") as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o666 & ~umask()
    assert read(os.open("made", os.O_RDONLY)) == ""
    assert read("made", opener=lambda path, flags: os.open("log", flags)) == "second\nthird\n"
    os.close(os.open("tool", os.O_WRONLY | os.O_CREAT))
    assert stat.S_IMODE(os.stat("tool").st_mode) == 0o777 & ~umask()
    assert redirect.opening.redirected is False


def read(path, **options):
    with open(path, **options) as file:
        return file.read()


def umask():
    value = os.umask(0)
    os.umask(value)
    return value


def test_directories_list_what_is_there_now(job):
    os.mkdir("runs/two", 0o700)
    written("runs/two/a")
    os.remove("runs/one/model.pt")
    assert stat.S_IMODE(os.stat("runs/two").st_mode) == 0o700
    assert sorted(os.listdir("runs")) == ["one", "two"]
    assert sorted(os.listdir()) == ["dead", "latest", "log", "runs"]
    assert os.listdir(b"runs/two") == [b"a"] and os.listdir("latest") == []
    descriptor = os.open("runs/one", os.O_RDONLY)
    assert os.listdir(descriptor) == LISTED(descriptor)
    os.close(descriptor)
    assert sorted(glob.glob("runs/**", recursive=True)) == ["runs/", "runs/one", "runs/two", "runs/two/a"]
    assert sorted(names for _, _, names in os.walk("runs")) == [[], [], ["a"]]


def test_entries_of_a_directory_say_what_they_are(job):
    written("file")
    with os.scandir() as entries:
        found = {entry.name: entry for entry in entries}
    kinds = {
        name: (entry.path, entry.is_file(), entry.is_dir(), entry.is_symlink())
        for name, entry in found.items()
    }
    assert kinds == {
        "log": ("./log", True, False, False),
        "file": ("./file", True, False, False),
        "runs": ("./runs", False, True, False),
        "latest": ("./latest", False, True, True),
        "dead": ("./dead", False, False, True),
    }
    latest, log = found["latest"], found["log"]
    assert not latest.is_dir(follow_symlinks=False) and not latest.is_file(follow_symlinks=False)
    assert log.is_file(follow_symlinks=False) and found["runs"].is_dir(follow_symlinks=False)
    assert latest.stat().st_ino == os.stat("runs/one").st_ino
    assert latest.stat(follow_symlinks=False).st_ino == latest.inode() == os.lstat("latest").st_ino
    assert os.fspath(log) == "./log"
    os.symlink("log", "link")
    link = next(entry for entry in os.scandir(job) if entry.name == "link")
    assert link.is_file() and not link.is_file(follow_symlinks=False) and link.path == str(job / "link")
    entries = os.scandir(".")
    assert iter(entries) is entries and next(entries).name in found
    entries.close()
    assert list(entries) == []


def test_looks_follow_links_as_they_do(job):
    written("runs/one/model.pt", "other weights")
    assert os.stat("latest/model.pt").st_size == len("other weights")
    assert stat.S_ISDIR(os.stat("latest").st_mode) and stat.S_ISLNK(os.lstat("latest").st_mode)
    assert stat.S_ISLNK(os.stat("latest", follow_symlinks=False).st_mode)
    assert os.readlink("latest") == "runs/one"
    assert os.access("log", os.W_OK) and not os.access("dead", os.F_OK)
    assert os.path.lexists("dead") and not os.path.exists("dead")
    assert os.statvfs("runs").f_bsize and os.path.samefile("latest", "runs/one")
    with open("log") as file:
        assert os.stat(file.fileno()).st_size == len("first line\n")
    os.mkdir("fresh")
    os.chdir("fresh")
    assert os.getcwd() == str(job / "fresh") and os.listdir() == []
    written("here")
    assert os.path.exists("../fresh/here") and os.path.abspath("here") == str(job / "fresh/here")


def test_changes_are_made_to_a_copy(job):
    os.chmod("log", 0o600)
    os.truncate("log", 5)
    os.utime("log", (10, 20))
    looked = os.stat("log")
    assert (stat.S_IMODE(looked.st_mode), looked.st_size, looked.st_mtime) == (0o600, 5, 20)
    os.chown("runs", os.getuid(), os.getgid())
    os.lchown("latest", os.getuid(), os.getgid())
    assert os.path.islink("latest") and os.path.isdir("runs/one")
    os.utime("latest", (10, 20), follow_symlinks=False)
    assert os.stat("latest").st_mtime != 20 == os.lstat("latest").st_mtime
    with open("log", "r+") as file:
        os.truncate(file.fileno(), 2)
    assert Path("log").read_text() == "fi"
    assert shutil.copy2("log", "copy") == "copy" and Path("copy").read_text() == "fi"


def test_names_are_made_and_taken_away(job):
    os.symlink("log", "link")
    os.link("log", "hard")
    os.link("link", "of link", follow_symlinks=False)
    os.link("link", "of file")
    os.mkfifo("pipe", 0o600)
    os.mknod("node")
    os.mknod("other pipe", stat.S_IFIFO | 0o640)
    assert (os.readlink("of link"), os.path.islink("of file")) == ("log", False)
    made = [stat.filemode(os.lstat(name).st_mode) for name in ("pipe", "node", "other pipe")]
    assert made == ["prw-------", "-rw-------", "prw-r-----"]
    written("hard", "same")
    os.symlink("runs", "to a folder")
    assert raised(os.link, "log", "runs") == ("EEXIST", "log")
    assert raised(os.rmdir, "to a folder") == ("ENOTDIR", "to a folder")
    os.unlink("to a folder")
    os.unlink("link")
    os.remove("latest")
    assert not os.path.lexists("link") and not os.path.lexists("latest")
    os.mkdir("empty")
    os.rmdir("empty")
    shutil.rmtree("runs")
    assert sorted(os.listdir()) == [
        *("dead", "hard", "log", "node", "of file", "of link", "other pipe", "pipe")
    ]


def test_paths_may_begin_at_a_descriptor(job):
    os.mkdir("made")
    here = os.open("runs", os.O_RDONLY)
    options = {"dir_fd": here}
    os.mkdir("two", **options)
    os.close(os.open("two/a", os.O_WRONLY | os.O_CREAT, **options))
    os.symlink("two", "link", **options)
    os.mkfifo("pipe", **options)
    os.link("two/a", "b", src_dir_fd=here, dst_dir_fd=here)
    os.rename("b", "c", src_dir_fd=here, dst_dir_fd=here)
    os.replace("c", "made/c", src_dir_fd=here)
    os.rename("made/c", "d", dst_dir_fd=here)
    assert os.stat("d", **options).st_size == 0 and os.readlink("link", **options) == "two"
    os.unlink("d", **options)
    os.unlink("two/a", **options)
    os.rmdir("two", **options)
    os.close(here)
    assert sorted(os.listdir("runs")) == ["link", "one", "pipe"] and os.listdir("made") == []


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        ("open", ("none", os.O_RDONLY), "ENOENT"),
        ("open", ("none/a", os.O_WRONLY | os.O_CREAT), "ENOENT"),
        ("open", ("latest", os.O_RDONLY | os.O_NOFOLLOW), "ELOOP"),
        ("open", ("runs", os.O_WRONLY), "EISDIR"),
        ("mkfifo", ("runs",), "EEXIST"),
        ("symlink", ("log", "latest"), "EEXIST"),
        ("unlink", ("runs",), "EISDIR"),
        ("chmod", ("none", 0o600), "ENOENT"),
        ("stat", (b"none",), "ENOENT"),
        ("lstat", (Path("none"),), "ENOENT"),
    ],
)
def test_errors_name_the_path_as_it_was_given_and_leave_nothing(job, files, function, arguments, expected):
    assert raised(getattr(os, function), *arguments) == (expected, arguments[0])
    assert (files.changes().written, files.changes().deleted) == ([], [])


def test_an_error_without_a_path_gets_none(job):
    with open("log") as file:
        descriptor = file.fileno()
    assert raised(os.stat, descriptor) == ("EBADF", descriptor)
    assert raised(os.listdir, descriptor) == raised(LISTED, descriptor)


def test_devices_and_the_scratch_directory_are_used_as_they_are(job):
    with open(os.devnull, "w") as file:
        file.write("nothing")
    assert os.stat(os.devnull).st_rdev == os.makedev(1, 3)
    inside = job.parent / "scratch/own"
    written(inside)
    assert "own" in LISTED(job.parent / "scratch") and os.listdir(inside.parent) == ["own"]
    os.remove(inside)
    assert "own" not in LISTED(job.parent / "scratch")


def test_temporary_files_have_no_name_in_the_folder(job):
    with tempfile.TemporaryFile(dir=".") as file:
        file.write(b"x")
        assert sorted(os.listdir()) == ["dead", "latest", "log", "runs"]
    with tempfile.NamedTemporaryFile(dir=".") as file:
        assert os.path.basename(file.name) in os.listdir()
        assert os.path.basename(file.name) not in LISTED(".")
    with tempfile.TemporaryDirectory(dir="runs") as folder:
        written(os.path.join(folder, "a"))


def test_compressed_files_are_written_to_the_copy(job):
    for module in (bz2, lzma):
        with module.open("packed", "wb") as file:
            file.write(b"text")
        with module.open("packed") as file:
            assert file.read() == b"text"
    written("module.py", "# coding: latin-1")
    with tokenize.open("module.py") as file:
        assert file.encoding == "iso-8859-1"
    with tarfile.open("all.tar", "w") as archive:
        archive.add("module.py")
    with tarfile.open("all.tar") as archive:
        assert archive.getnames() == ["module.py"]
