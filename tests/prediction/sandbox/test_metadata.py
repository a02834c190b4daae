"""Subprocesses and native code change no mode, owner, time or attribute of a file, but of scratch files."""

import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="system calls of Linux")

METADATA = """
    import ctypes, tempfile
    libc = ctypes.CDLL(None, use_errno=True)
    own = tempfile.mkdtemp()

    def changes(name):
        path = os.fsencode(name)
        where, file = os.path.split(path)
        folder, opened = os.open(where, os.O_RDONLY), os.open(path, os.O_RDONLY)
        user, group = os.stat(path).st_uid, os.stat(path).st_gid
        other = user if user else 1234  # only root gives files away
        times = (ctypes.c_long * 4)(1, 0, 1, 0)
        def refused(status):
            return status != 0
        found = [
            refused(libc.chmod(path, 0o701)),
            refused(libc.fchmod(opened, 0o702)),
            refused(libc.fchmodat(folder, file, 0o703, 0)),
            refused(libc.chown(path, other, group)),
            refused(libc.lchown(path, other, group)),
            refused(libc.fchown(opened, other, group)),
            refused(libc.fchownat(folder, file, other, group, 0)),
            refused(libc.utimensat(folder, file, times, 0)),
            refused(libc.futimens(opened, times)),
            *(
                refused(subprocess.run([*command, name], stderr=subprocess.DEVNULL).returncode)
                for command in (["chmod", "704"], ["touch", "-d", "2001-01-01"])
            ),
        ]
        libc.setxattr(path, b"user.one", b"1", 1, 0)
        libc.lsetxattr(path, b"user.two", b"1", 1, 0)
        libc.fsetxattr(opened, b"user.three", b"1", 1, 0)
        os.chdir(where)
        relative = b"./" + file
        os.symlink(path, own + "/link")
        found.append(refused(libc.chmod(relative, 0o705)))
        found.append(refused(libc.chmod(os.fsencode(own) + b"/link", 0o706)))
        found.append(refused(libc.chmod(b"/proc/self/fd/%d" % opened, 0o707)))
        os.remove(own + "/link")
        return sorted(set(found))

    outside = os.path.abspath("model.pt")
    seen.append(changes(outside))
    inside = own + "/file"
    with open(inside, "w") as file:
        file.write("x")
    seen.append(changes(inside))
    seen.append((oct(os.stat(inside).st_mode & 0o777), int(os.stat(inside).st_mtime) == 978307200))
"""


@pytest.mark.parametrize("level", ["overlay", "landlock"])
def test_native_code_and_subprocesses_change_metadata_of_scratch_files_alone(level, sandboxed, monkeypatch):
    (note,) = sandboxed("pass", levels=(level, "python")).notes or [""]
    if "cannot refuse" in note or "attributes of files" in note:
        return  # this system lacks what it takes, and the line says so
    monkeypatch.setenv("TZ", "UTC")
    done = sandboxed(METADATA, levels=(level,))
    # With an overlay they change their own view; `sandboxed` compares the files themselves.
    assert done.seen == ["[True]" if "allows no overlay" in note else "[False]", "[False]", "('0o707', True)"]
