"""An overlay keeps every write in memory, and lets all of the process read it back."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from memtriage.prediction.sandbox import overlay

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="overlays need Linux")

HEAD = """
import ctypes, errno, json, os, shutil, socket, stat, subprocess, sys
from memtriage.prediction.sandbox import overlay, syscalls

folder, elsewhere, scratch, user = *sys.argv[1:4], int(sys.argv[4])
found = {}

def become():
    if user != os.getuid():
        b"x".decode("unicode_escape").encode("idna")  # loaded while this user can read the standard library
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: its files of /proc are its own

def tried(name, call):
    try:
        found[name] = call()
    except OSError as error:
        found[name] = errno.errorcode[error.errno]

def text(path):
    with open(path) as file:
        return file.read()

def write(path, content):
    with open(path, "w") as file:
        file.write(content)

"""
WRITES = """
become()
os.chdir(folder)
before = os.stat(folder)
entered = overlay.enter(scratch, [folder + "/a/none/yet"], False)
found["here"] = os.getcwd() == folder
now = os.stat(".")
found["kept its mode and owner"] = (now.st_mode, now.st_uid, now.st_gid) == (
    before.st_mode, before.st_uid, before.st_gid)
write("a/new", "new")
write("kept", "changed")
os.remove("gone")
shutil.rmtree("tree")
os.symlink("kept", "link")
os.mkfifo("pipe")
os.rename("moved", "there")
os.makedirs("a/none/yet")
tried("elsewhere", lambda: write(elsewhere + "/made", "x"))
write("/dev/shm/memtriage-overlay-test", "memory")
write("/dev/null", "nothing")
found["by another program"] = subprocess.run(["cat", "kept", "a/new"], capture_output=True, text=True).stdout
changes = entered()
found["written"], found["deleted"] = sorted(changes.written), sorted(changes.deleted)
tried("root", lambda: write("/memtriage-overlay-test", "x"))
tried("proc", lambda: write("/proc/sys/kernel/hostname", "memtriage"))
listening = socket.create_server(("127.0.0.1", 0))
socket.create_connection(listening.getsockname(), timeout=5).close()
tried("network", lambda: socket.create_connection(("192.0.2.1", 9), timeout=5))
found["descriptors"] = sorted(int(name) >= 512 for name in os.listdir("/proc/self/fd") if int(name) > 10)
found["scratch"] = os.path.exists(scratch + "/0") and stat.S_IMODE(os.stat(scratch).st_mode)
print(json.dumps(found))
"""
MOUNTS = """
syscalls.unshare(syscalls.CLONE_NEWNS)
syscalls.mount("none", "/", None, syscalls.MS_REC | 1 << 18)  # MS_PRIVATE
syscalls.mount("tmpfs", folder, "tmpfs", 0, "mode=755")
for name in ("inner", "read only", "comma,colon:"):
    os.mkdir(f"{folder}/{name}")
    syscalls.mount("tmpfs", f"{folder}/{name}", "tmpfs", 0, "mode=750")
    write(f"{folder}/{name}/kept", "kept")
os.mkdir(f"{folder}/inner/most")
syscalls.mount("tmpfs", f"{folder}/inner/most", "tmpfs")
write(f"{folder}/inner/most/kept", "kept")
write(f"{folder}/kept", "kept")
os.makedirs(f"{folder}/plain/below")
write(f"{folder}/plain/below/kept", "kept")
for path, _, names in os.walk(folder):
    for name in (".", *names):
        os.chown(f"{path}/{name}", user, user)
syscalls.mount("tmpfs", f"{folder}/read only", None, syscalls.MS_BIND | 32 | 1)  # MS_REMOUNT, MS_RDONLY
places = PLACES
below = {place: os.open(f"{folder}/{place}", os.O_RDONLY) for place in places}
become()
network = os.readlink("/proc/self/ns/net")
entered = overlay.enter(scratch, [folder], True)
found["same network"] = os.readlink("/proc/self/ns/net") == network
for place in places:
    tried("write " + place, lambda: write(f"{folder}/{place}kept", "changed"))
    found["read " + place] = text(f"{folder}/{place}kept")
    with open(os.open("kept", os.O_RDONLY, dir_fd=below[place])) as file:
        found["below " + place] = file.read()
found["written"] = sorted(entered().written)
found["mode"] = stat.S_IMODE(os.stat(f"{folder}/inner").st_mode)
print(json.dumps(found))
"""


PROCESSES = """
become()
starter = os.getppid()
overlay.enter(scratch, [folder], False, OWN)
tried("through another process", lambda: write(f"/proc/{starter}/root{folder}/kept", "x"))
found["memory"] = text("/proc/sysvipc/shm").count(chr(10))
print(json.dumps(found))
"""


@pytest.fixture
def ran():
    """Returns what a program finds in a process of its own, and afterwards the files that there are."""
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory(dir="/var/tmp") as far:
        folders = [Path(place, "job"), Path(far), Path(place, "scratch")]
        for folder in (folders[0], folders[2]):
            folder.mkdir()
        for folder in ("a", "tree/deep"):
            (folders[0] / folder).mkdir(parents=True)
        for name in ("kept", "gone", "moved", "tree/deep/file"):
            (folders[0] / name).write_text(name)
        folders[0].chmod(0o751)

        def run(body, user):
            if user != os.getuid():
                for path in (Path(far), Path(place), *Path(place).rglob("*")):
                    os.chown(path, user, user)
            program = [sys.executable, "-c", HEAD + body, *map(str, folders), str(user)]
            done = subprocess.run(program, capture_output=True, text=True)
            if "overlay.enter" in done.stderr or "syscalls.unshare" in done.stderr:
                pytest.skip("this system allows no overlay")
            assert done.returncode == 0, done.stderr
            left = {str(path): path.read_text() for path in Path(place).rglob("*") if path.is_file()}
            assert os.listdir(far) == []
            return json.loads(done.stdout.replace(place, "").replace(far, "/elsewhere")), {
                path.removeprefix(place): text for path, text in left.items()
            }

        yield run


@pytest.fixture(params=["own", "nobody"])
def user(request):
    if request.param == "own":
        return os.getuid()
    if os.getuid() != 0:
        pytest.skip("only root becomes another user")
    return 65534


def test_writes_are_read_back_and_gone_with_the_process(ran, user):
    found, left = ran(WRITES, user)
    assert found == {
        "here": True,
        "kept its mode and owner": True,
        "by another program": "changednew",
        "elsewhere": None if user == os.getuid() else "EOVERFLOW",  # a folder of root's in between
        "written": ["/job/a/new", "/job/kept", "/job/link", "/job/there"]
        + ["/elsewhere/made"] * (user == os.getuid()),
        "deleted": ["/job/gone", "/job/moved", "/job/tree"],
        "root": "EROFS",
        "proc": "EROFS",
        "network": "ENETUNREACH",
        "descriptors": [True],
        "scratch": False,
    }
    assert left == {f"/job/{name}": name for name in ("kept", "gone", "moved")} | {
        "/job/tree/deep/file": "tree/deep/file"
    }
    assert not os.path.exists("/dev/shm/memtriage-overlay-test")


@pytest.mark.parametrize(("own", "error"), [(True, "ENOENT"), (False, "EACCES")])
def test_other_processes_lead_to_no_file_and_their_memory_is_not_seen(ran, user, own, error):
    found, left = ran(PROCESSES.replace("OWN", str(own)), user)
    assert found == {"through another process": error, "memory": 1}  # the line of headings
    assert left["/job/kept"] == "kept"


MOUNTED = ["", "plain/below/", "inner/", "inner/most/", "comma,colon:/", "read only/"]
OF_NOBODY = {"plain/below/", "inner/most/", "comma,colon:/"}
"""Places that a user who is not root can cover: what is mounted elsewhere stays as it is."""


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root mounts")
def test_what_is_mounted_inside_is_covered_too(ran, user):
    covered = set(MOUNTED) - {"read only/"} if user == 0 else OF_NOBODY
    expected = {"same network": True, "mode": 0o750}
    expected["written"] = sorted(f"/job/{place}kept" for place in covered)
    for place in MOUNTED:
        expected[f"write {place}"] = None if place in covered else "EROFS"
        expected[f"read {place}"] = "changed" if place in covered else "kept"
        expected[f"below {place}"] = "kept"
    assert ran(MOUNTS.replace("PLACES", repr(MOUNTED)), user)[0] == expected


def test_descriptors_of_the_sandbox_have_high_numbers():
    low, other = os.pipe()
    high = overlay.high_descriptor(low)
    assert high >= 512 and not os.get_inheritable(high)
    os.write(other, b"x")
    assert os.read(high, 1) == b"x"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(low)
    os.close(high)
    os.close(other)


def test_memory_that_processes_share_is_no_change(tmp_path):
    for name, path in (("one", "a/file"), ("two", "file")):
        (tmp_path / name / path).parent.mkdir(parents=True)
        (tmp_path / name / path).write_text("x")
    covered = {"/dev/shm": str(tmp_path / "two"), "/job": str(tmp_path / "one")}
    changes = overlay.changes_of(covered)
    assert (changes.written, changes.deleted) == (["/job/a/file"], [])
