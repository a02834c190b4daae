"""Sends what Python code writes to a scratch copy, where the kernel cannot do it for the whole process.

`open` and the functions of `os` that take paths are replaced; whatever the standard library builds on them
(`pathlib`, `shutil`, `tempfile`, `glob`) follows.

Known limits: native code that opens files itself is not redirected, except torch's checkpoints and
safetensors; neither are subprocesses. The process serves one trace, so nothing is put back at the end.
"""

from __future__ import annotations

import builtins
import errno
import functools
import importlib
import importlib.util
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from memtriage.prediction.sandbox.copy_on_write import CopyOnWrite, file_error

_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_LOOK: Final = ("stat", "access", "statvfs", "getxattr", "listxattr", "chdir")
_LOOK_AT_LINK: Final = ("lstat", "readlink")
_CHANGE: Final = ("chmod", "chown", "utime", "truncate", "setxattr", "removexattr")
_CHANGE_LINK: Final = ("lchown",)
opening: Final = threading.local()
"""`opening.redirected` is true in a thread that is inside the replaced `open`."""


def install(files: CopyOnWrite) -> None:
    """Replace `open` and the functions of `os`, for the rest of the process."""
    functions = _Functions(files)
    replaced = functions.with_own_logic()
    for names, follow, change in (
        (_LOOK, True, False),
        (_LOOK_AT_LINK, False, False),
        (_CHANGE, True, True),
        (_CHANGE_LINK, False, True),
    ):
        for name in names:
            if hasattr(os, name):
                replaced[name] = functions.of_a_path(getattr(os, name), follow, change)
    before = {name: getattr(os, name) for name in replaced}
    new = {id(before[name]): _naming(before[name], function) for name, function in replaced.items()}
    new[id(open)] = functools.wraps(open)(_opened(open))
    for module in list(sys.modules.values()):
        _replace_in(module, new)
    builtins.open = new[id(open)]
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # else trees are removed by descriptor
    if "tempfile" in sys.modules:
        importlib.reload(sys.modules["tempfile"])  # default arguments keep `os.unlink`


def _replace_in(module: Any, new: Mapping[int, Callable[..., Any]]) -> None:
    """Replace functions wherever a module keeps them: bz2 and tarfile have `open` under a name of theirs."""
    names = getattr(module, "__dict__", {})
    name = names.get("__name__", "")
    if name in sys.builtin_module_names or str(name).partition(".")[0] == "memtriage":
        return
    for key, value in list(names.items()):
        if id(value) in new:
            setattr(module, key, new[id(value)])


def install_native(files: CopyOnWrite) -> None:
    """Redirect the checkpoints that torch and safetensors read and write by themselves; imports both."""
    import torch

    def reads(path: Any) -> str:
        return files.read(files.resolve(path))

    def writes(path: Any) -> str:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
        return reads(path)

    replaced = [(torch._C, "PyTorchFileWriter", 0, writes), (torch._C, "PyTorchFileReader", 0, reads)]
    if importlib.util.find_spec("safetensors") is not None:
        import safetensors

        replaced += [(safetensors, "serialize_file", 1, writes), (safetensors, "safe_open", 0, reads)]
    for module, name, position, place in replaced:
        setattr(module, name, _native(getattr(module, name), position, place))


def _native(original: Callable[..., Any], position: int, place: Callable[[Any], str]) -> Callable[..., Any]:
    """A function of native code, one argument of which is a path (or something else, left alone)."""

    @functools.wraps(original, updated=())
    def called(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        if len(given) > position and isinstance(given[position], (str, os.PathLike)):
            given[position] = place(given[position])
        return original(*given, **kwargs)

    return called


def _naming(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with errors that name the path as the program gave it."""

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            if args and isinstance(args[0], (str, bytes, os.PathLike)) and error.filename is not None:
                error.filename = args[0]
            raise

    return called


def _opened(original: Callable[..., Any]) -> Callable[..., Any]:
    """`open`, with a descriptor from `os.open`: so the file keeps the name that it was given."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags, 0o666)

    def called(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or kwargs.get("opener") is not None:
            return original(file, *args, **kwargs)
        opening.redirected = True
        try:
            return original(file, *args, **{**kwargs, "opener": opener})
        finally:
            opening.redirected = False

    return called


class _Functions:
    """The functions of `os` over a scratch copy. Their parameters are those of `os`."""

    def __init__(self, files: CopyOnWrite) -> None:
        self._files = files
        self._open, self._link, self._symlink, self._replace = os.open, os.link, os.symlink, os.replace
        self._listdir = os.listdir

    def with_own_logic(self) -> dict[str, Callable[..., Any]]:
        """Functions that do more than to use one path that exists."""
        return {
            "getcwd": self._files.getcwd,
            "open": self.open,
            **{name: self.of_a_new_path(getattr(os, name)) for name in ("mkdir", "mkfifo", "mknod")},
            "symlink": self.symlink,
            "link": self.link,
            "unlink": self.unlink,
            "remove": self.unlink,
            "rmdir": self.rmdir,
            "rename": self.rename,
            "replace": self.rename,
            "listdir": self.listdir,
            "scandir": self.scandir,
        }

    def of_a_path(self, original: Callable[..., Any], follow: bool, change: bool) -> Callable[..., Any]:
        """A function whose first argument is a path, or a descriptor.

        Args:
            follow: it follows a symbolic link at the end of the path.
            change: it changes what is there.
        """
        files = self._files

        def called(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, int):
                return original(path, *args, **kwargs)
            follows = follow and kwargs.get("follow_symlinks", True)
            place = files.resolve(path, follows, kwargs.pop("dir_fd", None))
            return original(files.change(place) if change else files.read(place), *args, **kwargs)

        return called

    def of_a_new_path(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose first argument is a path at which it makes something."""

        def called(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
            original(self._new(path, dir_fd), *args, **kwargs)

        return called

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        exclusive = bool(flags & os.O_CREAT and flags & os.O_EXCL)
        place = self._files.resolve(path, not exclusive and not flags & os.O_NOFOLLOW, dir_fd)
        where = self._files.read(place)
        if flags & _WRITES and not self._files.is_exempt(place):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                where = os.path.dirname(self._files.make(os.path.join(place, "file")))
            elif self._files.exists(place):
                if exclusive:
                    raise file_error(errno.EEXIST, path)
                if not self._files.is_directory(place):
                    where = self._files.change(place)
            else:
                where = self._files.make(place)
        return self._open(where, flags, mode)

    def symlink(
        self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None
    ) -> None:
        self._symlink(src, self._new(dst, dir_fd))

    def link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        source = self._files.change(self._files.resolve(src, follow_symlinks, src_dir_fd))
        self._link(source, self._new(dst, dst_dir_fd))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._files.delete(self._files.resolve(path, False, dir_fd), "unlink")

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._files.delete(self._files.resolve(path, False, dir_fd), "rmdir")

    def rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        files = self._files
        source, target = files.resolve(src, False, src_dir_fd), files.resolve(dst, False, dst_dir_fd)
        files.make(source)  # rename(2) looks for both directories before it looks for what is in them
        where = files.make(target)
        if not files.exists(source):
            raise file_error(errno.ENOENT, src)
        self._check_rename(source, target)
        if source != target:
            self._replace(files.take(source), where)
            files.hide(target)

    def _check_rename(self, source: str, target: str) -> None:
        """Raise what rename(2) raises; the scratch copy alone does not show it."""
        files = self._files
        if target.startswith(source + "/"):
            raise file_error(errno.EINVAL, source)
        if source.startswith(target + "/"):
            raise file_error(errno.ENOTEMPTY, source)
        if source != target and files.exists(target):
            if files.is_directory(source) and not files.is_directory(target):
                raise file_error(errno.ENOTDIR, source)
            if files.is_directory(target) and not files.is_directory(source):
                raise file_error(errno.EISDIR, source)
            if files.is_directory(target) and files.names(target):
                raise file_error(errno.ENOTEMPTY, source)

    def listdir(self, path: Any = ".") -> list[Any]:
        if isinstance(path, int):
            return self._listdir(path)
        names = self._files.names(self._files.resolve(path))
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> _Entries:
        return _Entries(path, os.listdir(path))

    def _new(self, path: Any, dir_fd: int | None) -> str:
        """Where to make something that is not there yet."""
        place = self._files.resolve(path, False, dir_fd)
        if self._files.exists(place):
            raise file_error(errno.EEXIST, path)
        return self._files.make(place)


class _Entries:
    """What `os.scandir` returns."""

    def __init__(self, directory: Any, names: list[Any]) -> None:
        self._entries = iter([_Entry(directory, name) for name in names])

    def __iter__(self) -> Iterator[_Entry]:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


class _Entry:
    """An `os.DirEntry`, which cannot be made from Python."""

    def __init__(self, directory: Any, name: Any) -> None:
        self.name = name
        self.path = os.path.join(os.fspath(directory), name)

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return os.lstat(self.path).st_ino

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())
