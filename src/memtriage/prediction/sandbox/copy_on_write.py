"""A scratch copy of the file system, kept by paths: what is written is copied, what is deleted is hidden.

Paths in here are *places*: absolute, without symbolic links, as the program sees them. The scratch copy of
`/a/b` is `ROOT/a/b`. A directory exists in both at once; a file of the scratch copy hides the one below.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat

# By name: those of the module `os` may be replaced later, by functions that come here.
from os import chmod, getcwd, listdir, lstat, mkdir, readlink, rmdir, scandir, symlink, unlink
from typing import Any, Final

from memtriage.prediction.sandbox.changes import Changes

_LINKS_FOLLOWED: Final = 40
"""As many symbolic links as Linux follows in one path."""
_SPECIAL: Final = ("/dev/", "/proc/", "/sys/")
"""No files of a user's: never copied."""
_open: Final = open


class CopyOnWrite:
    """A scratch copy below a directory.

    Args:
        root: an existing directory.
        temporary: a directory that is used as it is, so that subprocesses see what Python code writes there.
    """

    def __init__(self, root: str, temporary: str | None = None) -> None:
        self.root = os.path.realpath(root)
        own = [self.root] if temporary is None else [self.root, os.path.realpath(temporary)]
        self._exempt = (*_SPECIAL, *(directory + "/" for directory in own))
        self._gone: set[str] = set()
        """Places that were deleted below. They stay hidden when something new has their name."""

    # --- looking --------------------------------------------------------------------------------------------

    def resolve(self, path: Any, follow: bool = True, dir_fd: int | None = None) -> str:
        """The place of a path.

        Args:
            follow: also resolve a symbolic link at its end.
            dir_fd: the directory that a relative path begins at, as in `os`.
        """
        text = os.fsdecode(path)
        if not text.startswith("/"):
            text = f"{self.getcwd() if dir_fd is None else self._directory(dir_fd)}/{text}"
        parts = text.split("/")[::-1]
        place, links = "/", 0
        while parts:
            part = parts.pop()
            if part in ("", "."):
                continue
            if part == "..":
                self._check_directory(place, text)
                place = os.path.dirname(place)
                continue
            longer = os.path.join(place, part)
            target = self._target(longer) if follow or any(parts) else None
            if target is None:
                place = longer
                continue
            links += 1
            if links > _LINKS_FOLLOWED:
                raise file_error(errno.ELOOP, text)
            if target.startswith("/"):
                place = "/"
            parts += target.split("/")[::-1]
        return place

    def read(self, place: str) -> str:
        """Where to read a place; there need not be anything."""
        in_copy = not self.is_exempt(place) and (self._exists(self.root + place) or self._hidden(place))
        return self.root + place if in_copy else place

    def exists(self, place: str) -> bool:
        """Whether there is anything, be it a link that leads nowhere."""
        return self._exists(self.read(place))

    def is_directory(self, place: str) -> bool:
        return self._is_directory(self.read(place))

    def names(self, place: str) -> list[str]:
        """What a directory contains."""
        copy = self.root + place
        if self.is_exempt(place) or not (self._exists(copy) or self._hidden(place)):
            return [name for name in listdir(place) if os.path.join(place, name) not in self._gone]
        names = dict.fromkeys(listdir(copy))
        if not self._hidden(place) and self._is_directory(place):
            below = (name for name in listdir(place) if os.path.join(place, name) not in self._gone)
            names.update(dict.fromkeys(below))
        return list(names)

    def is_exempt(self, place: str) -> bool:
        """Whether a place is used as it is: a device, or a part of the scratch directory."""
        return (place + "/").startswith(self._exempt)

    def getcwd(self) -> str:
        """The working directory as the program sees it."""
        return self._seen(getcwd())

    def changes(self) -> Changes:
        """What was written and deleted up to now."""
        changes = Changes(deleted=sorted(path for path in self._gone if not self._exists(self.root + path)))
        folders = [self.root]
        while folders:
            for entry in scandir(folders.pop()):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    changes.written.append(entry.path[len(self.root) :])
        return changes

    # --- changing -------------------------------------------------------------------------------------------

    def change(self, place: str) -> str:
        """Where to change what is at a place; it is copied first.

        Raises:
            FileNotFoundError: there is nothing.
        """
        if self.is_exempt(place):
            return place
        copy = self.root + place
        if not self._exists(copy):
            self._copy(place)
        return copy

    def make(self, place: str) -> str:
        """Where to make something at a place; its directory is made in the scratch copy.

        Raises:
            FileNotFoundError, NotADirectoryError: the program sees no such directory.
        """
        if not self.is_exempt(place):
            self._make_parent(place)
            return self.root + place
        return place

    def delete(self, place: str, how: str) -> None:
        """Delete what is at a place by `os.unlink` or `os.rmdir`, as `how` says."""
        if how == "rmdir" and self.is_directory(place) and self.names(place):
            raise file_error(errno.ENOTEMPTY, place)
        remove = rmdir if how == "rmdir" else unlink
        if self.is_exempt(place):
            remove(place)
            return
        is_below = self._is_below(place)
        if is_below and not self._exists(self.root + place):
            if how == "unlink" and self._is_directory(place):
                raise file_error(errno.EISDIR, place)
            if how == "rmdir" and not self._is_directory(place):
                raise file_error(errno.ENOTDIR, place)
        else:
            remove(self.root + place)
        if is_below:
            self._gone.add(place)

    def take(self, place: str) -> str:
        """Prepare to move what is at a place, with all that it contains, and hide it below.

        Returns where it is, to be moved away from there.
        """
        self._copy_tree(place)
        if self._is_below(place):
            self._gone.add(place)
        return self.root + place

    def hide(self, place: str) -> None:
        """Hide what a place has below: something else is about to take its name."""
        if self._is_below(place):
            self._gone.add(place)

    def _copy_tree(self, place: str) -> None:
        if self._is_directory(self.change(place)):
            for name in self.names(place):
                self._copy_tree(os.path.join(place, name))

    def _copy(self, place: str) -> None:
        """Copy one file, link or directory (without what it contains)."""
        self._make_parent(place)
        mode = None if self._hidden(place) else self._mode(place)
        if mode is None:
            raise file_error(errno.ENOENT, place)
        copy = self.root + place
        if stat.S_ISLNK(mode):
            symlink(readlink(place), copy)
        elif stat.S_ISDIR(mode):
            mkdir(copy)
        else:
            with _open(place, "rb") as source, _open(copy, "wb") as target:
                shutil.copyfileobj(source, target)
            chmod(copy, stat.S_IMODE(mode) | stat.S_IWUSR)

    def _make_parent(self, place: str) -> None:
        parent = os.path.dirname(place)
        self._check_directory(parent, place)
        if not self._exists(self.root + parent):
            self._make_parent(parent)
            mkdir(self.root + parent)

    # --- parts ----------------------------------------------------------------------------------------------

    def _directory(self, descriptor: int) -> str:
        return self._seen(readlink(f"/proc/self/fd/{descriptor}"))

    def _seen(self, path: str) -> str:
        """A directory of the scratch copy as the program knows it."""
        inside = path == self.root or path.startswith(self.root + "/")
        return (path[len(self.root) :] or "/") if inside else path

    def _target(self, place: str) -> str | None:
        """Where a symbolic link leads; None for anything else."""
        try:
            return readlink(self.read(place))
        except OSError:
            return None

    def _hidden(self, place: str) -> bool:
        while place != "/":
            if place in self._gone:
                return True
            place = os.path.dirname(place)
        return False

    def _is_below(self, place: str) -> bool:
        return not self.is_exempt(place) and not self._hidden(place) and self._exists(place)

    def _exists(self, path: str) -> bool:
        return self._mode(path) is not None

    def _is_directory(self, path: str) -> bool:
        return stat.S_ISDIR(self._mode(path) or 0)

    def _mode(self, path: str) -> int | None:
        try:
            return lstat(path).st_mode
        except OSError:
            return None

    def _check_directory(self, place: str, path: str) -> None:
        """Raise what a system call raises for `path` where `place`, on the way, is no directory."""
        try:
            mode = lstat(self.read(place)).st_mode
        except OSError as error:
            raise file_error(error.errno or errno.ENOENT, path) from None
        if not stat.S_ISDIR(mode):
            raise file_error(errno.ENOTDIR, path)


def file_error(number: int, path: Any) -> OSError:
    """The error of a system call about a path."""
    return OSError(number, os.strerror(number), path)
