"""System calls that Python has no function for: they do what they say or raise the system's error."""

import errno
import json
import os
import subprocess
import sys

import pytest

from memtriage.prediction.sandbox import syscalls

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="system calls of Linux")

PROGRAM = """
import ctypes, errno, json, os, signal, sys
from memtriage.prediction.sandbox import syscalls

folder = sys.argv[1]
found = {}

def tried(name, call):
    try:
        found[name] = call()
    except OSError as error:
        found[name] = errno.errorcode[error.errno]

def write(path):
    with open(path, "w") as file:
        return file.write("x")

value = ctypes.c_int()
syscalls.die_with_parent(signal.SIGUSR1)
ctypes.CDLL(None).prctl(2, ctypes.byref(value))  # PR_GET_PDEATHSIG
found["signal"] = value.value == signal.SIGUSR1
before = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "user")}
syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWNET)
found["left"] = [name for name in before if os.readlink(f"/proc/self/ns/{name}") != before[name]]
syscalls.mount("none", "/", None, syscalls.MS_REC | 1 << 20)  # MS_SHARED
syscalls.make_mounts_read_only()
tried("read-only", lambda: write(folder + "/file"))
tried("read-only below", lambda: write("/dev/shm/memtriage-test"))
with open("/proc/self/mountinfo") as file:
    found["private"] = not any("shared:" in line for line in file)
syscalls.mount("tmpfs", folder, "tmpfs", 8, "size=64k,mode=710")  # MS_NOEXEC
tried("mounted", lambda: write(folder + "/file"))
found["mode"] = oct(os.stat(folder).st_mode & 0o777)
tried("size", lambda: os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize)
found["no programs"] = bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)
os.makedirs(folder + "/one/inner")
os.mkdir(folder + "/two")
syscalls.mount("tmpfs", folder + "/one/inner", "tmpfs")
write(folder + "/one/inner/file")
syscalls.mount(folder + "/one", folder + "/two", None, syscalls.MS_BIND | syscalls.MS_REC)
found["bound"] = os.listdir(folder + "/two/inner")
print(json.dumps(found))
"""
LANDLOCK = """
import ctypes, errno, json, os, sys
from memtriage.prediction.sandbox import syscalls

allowed, other = sys.argv[1:]
WRITE, MAKE = 1 << 1, 1 << 8  # LANDLOCK_ACCESS_FS_WRITE_FILE, _MAKE_REG
rules = syscalls.landlock_ruleset(WRITE | MAKE, 0)
place = os.open(allowed, os.O_PATH)
syscalls.landlock_allow(rules, place, WRITE | MAKE)
syscalls.landlock_enforce(rules)
found = {"no new rights": ctypes.CDLL(None).prctl(39, 0, 0, 0, 0)}  # PR_GET_NO_NEW_PRIVS
for name, folder in (("allowed", allowed), ("other", other)):
    try:
        os.close(os.open(folder + "/made", os.O_WRONLY | os.O_CREAT))
        found[name] = "made"
    except OSError as error:
        found[name] = errno.errorcode[error.errno]
print(json.dumps(found))
"""


def ran(program, *folders):
    done = subprocess.run([sys.executable, "-c", program, *map(str, folders)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root mounts")
def test_a_process_gets_mounts_of_its_own(tmp_path):
    assert ran(PROGRAM, tmp_path) == {
        "signal": True,
        "left": ["mnt", "net"],
        "read-only": "EROFS",
        "read-only below": "EROFS",
        "private": True,
        "mounted": 1,
        "mode": "0o710",
        "size": 65536,
        "no programs": True,
        "bound": ["file"],
    }
    assert os.listdir(tmp_path) == []


def test_landlock_refuses_what_no_rule_allows(tmp_path):
    try:
        assert syscalls.landlock_version() >= 1
    except OSError:
        pytest.skip("this system has no Landlock")
    (tmp_path / "allowed").mkdir()
    (tmp_path / "other").mkdir()
    assert ran(LANDLOCK, tmp_path / "allowed", tmp_path / "other") == {
        "no new rights": 1,
        "allowed": "made",
        "other": "EACCES",
    }


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: syscalls.unshare(1), ("EINVAL",)),
        (lambda: syscalls.mount("none", "/no/such/place", "tmpfs"), ("ENOENT", "EPERM")),
        (lambda: syscalls.die_with_parent(-1), ("EINVAL",)),
        (lambda: syscalls.landlock_allow(-1, -1, 0), ("EBADF", "ENOSYS", "EOPNOTSUPP")),
        (lambda: syscalls.landlock_ruleset(0, 0), ("ENOMSG", "ENOSYS", "EOPNOTSUPP")),
    ],
    ids=["unshare", "mount", "signal", "rule", "rules"],
)
def test_what_the_system_refuses_is_an_error_with_its_number(call, expected):
    with pytest.raises(OSError) as raised:
        call()
    assert errno.errorcode[raised.value.errno] in expected
    assert raised.value.strerror == os.strerror(raised.value.errno)
