"""The replaced functions of `os` behave as the true ones do, and leave the files as they were."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memtriage.prediction.sandbox import redirect
from memtriage.prediction.sandbox.copy_on_write import CopyOnWrite

NAMES = st.sampled_from(
    ["a", "b", "d", "d/a", "d/e", "d/e/a", "link", "link/a", "missing/a", "d/../a", "dead"]
)
OPERATIONS = st.one_of(
    st.tuples(
        st.sampled_from(["write", "append", "exclusive", "read", "mkdir", "rmdir", "remove", "list"]), NAMES
    ),
    st.tuples(st.sampled_from(["stat", "lstat", "readlink", "truncate", "touch"]), NAMES),
    st.tuples(st.sampled_from(["rename", "symlink", "hard link"]), NAMES, NAMES),
)


def a_tree(folder: Path) -> Path:
    (folder / "d/e").mkdir(parents=True)
    for name in ("a", "d/a", "d/e/a"):
        (folder / name).write_text(name)
    (folder / "link").symlink_to("d")
    (folder / "dead").symlink_to("nowhere")
    return folder


def contents(folder: Path) -> dict[str, object]:
    """Every path below a folder, with what it is."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else (path.read_text() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
    }


def functions(scratch: str) -> dict[str, object]:
    files = CopyOnWrite(scratch)
    made = redirect._Functions(files)
    looks = {
        name: made.of_a_path(getattr(os, name), name == "stat", False)
        for name in ("stat", "lstat", "readlink")
    }
    changes = {name: made.of_a_path(getattr(os, name), True, True) for name in ("truncate", "utime")}
    return {**made.with_own_logic(), **looks, **changes}


TRUE = {name: getattr(os, name) for name in dir(os)}


def perform(call, folder: Path, operation: str, *names: str) -> object:
    """Do one thing; returns what it gave, or the number of its error."""
    path, *other = [str(folder / name) for name in names]
    flags = {
        "write": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
        "append": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        "exclusive": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
        "read": os.O_RDONLY,
    }
    try:
        if operation in flags:
            descriptor = call["open"](path, flags[operation], 0o666)
            try:
                if operation == "read":
                    return os.read(descriptor, 99)
                return os.write(descriptor, operation.encode())
            finally:
                os.close(descriptor)
        match operation:
            case "list":
                return sorted(call["listdir"](path))
            case "mkdir" | "rmdir" | "remove" | "readlink":
                return call[operation](path)
            case "stat" | "lstat":
                return call[operation](path).st_mode >> 12
            case "truncate":
                return call["truncate"](path, 1)
            case "touch":
                return call["utime"](path)
            case "rename":
                return call["rename"](path, other[0])
            case "symlink":
                return call["symlink"](names[0], other[0])
            case "hard link":
                return call["link"](path, other[0], follow_symlinks=False)
    except OSError as error:
        return type(error)


def seen(call, folder: str) -> dict[str, object]:
    """The tree through the replaced functions."""
    found = {}
    for name in call["listdir"](folder):
        path = f"{folder}/{name}"
        mode = call["lstat"](path).st_mode >> 12
        if mode == 0o12:
            found[name] = call["readlink"](path)
        elif mode == 0o4:
            found[name] = None
            found |= {f"{name}/{inner}": what for inner, what in seen(call, path).items()}
        else:
            descriptor = call["open"](path, os.O_RDONLY)
            found[name] = os.read(descriptor, 99).decode()
            os.close(descriptor)
    return found


@settings(max_examples=150, deadline=None)
@example([("rename", "a", "link"), ("rename", "a", "link/a")])
@example([("rename", "a", "link"), ("rename", "link/a", "a")])
@given(st.lists(OPERATIONS, max_size=8))
def test_a_scratch_copy_behaves_as_the_file_system_does(operations):
    with tempfile.TemporaryDirectory() as place:
        kept, twin = a_tree(Path(place, "kept")), a_tree(Path(place, "twin"))
        scratch = Path(place, "scratch")
        scratch.mkdir()
        before, call = contents(kept), functions(str(scratch))
        for operation in operations:
            assert perform(call, kept, *operation) == perform(TRUE, twin, *operation), operation
        assert seen(call, str(kept)) == contents(twin)
        assert contents(kept) == before


def test_a_loop_of_links_is_an_error(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        CopyOnWrite(str(tmp_path / "scratch")).resolve(tmp_path / "loop" / "x")


def test_what_was_written_and_deleted_is_listed(tmp_path):
    kept = a_tree(tmp_path / "kept")
    (tmp_path / "scratch").mkdir()
    call = functions(str(tmp_path / "scratch"))
    files = call["unlink"].__self__._files
    perform(call, kept, "write", "new")
    perform(call, kept, "remove", "a")
    changes = files.changes()
    assert changes.written == [f"{kept}/new"] and changes.deleted == [f"{kept}/a"]
    shutil.rmtree(kept)
