"""Landlock refuses writes outside some directories, and connections, as far as the kernel's version does."""

import json
import os
import socket
import subprocess
import sys

import pytest

from memtriage.prediction.sandbox import syscalls

PROGRAM = """
import errno, json, os, socket, sys
from memtriage.prediction.sandbox import landlock, syscalls

mine, other, network, version = sys.argv[1:]
found = {}

def tried(name, call):
    try:
        call()
        found[name] = "done"
    except OSError as error:
        found[name] = errno.errorcode[error.errno]

def write(path):
    with open(path, "w") as file:
        file.write("x")

before = os.listdir("/proc/self/fd")
if int(version):
    syscalls.landlock_version = lambda: int(version)
found["not protected"] = landlock.enforce([mine], bool(int(network)))
found["descriptors"] = len(os.listdir("/proc/self/fd")) - len(before)
for place in (mine, other):
    name = os.path.basename(place)
    tried(name + " read", lambda: open(place + "/kept").close())
    tried(name + " write", lambda: write(place + "/kept"))
    tried(name + " truncate", lambda: os.truncate(place + "/kept", 0))
    tried(name + " make", lambda: os.mkdir(place + "/new"))
    tried(name + " fifo", lambda: os.mkfifo(place + "/pipe"))
    tried(name + " symlink", lambda: os.symlink("kept", place + "/link"))
    tried(name + " rename", lambda: os.rename(place + "/kept", place + "/moved"))
    tried(name + " remove", lambda: os.remove(place + "/moved"))
    tried(name + " rmdir", lambda: os.rmdir(place + "/empty"))
    tried(name + " bind", lambda: socket.socket(socket.AF_UNIX).bind(place + "/s"))
os.mkdir(mine + "/folder")
write(mine + "/a")
tried("another folder", lambda: os.rename(mine + "/a", mine + "/folder/a"))
tried("device", lambda: write("/dev/null"))
tried("signal", lambda: os.kill(os.getppid(), 0))
abstract = "\\0" + os.path.dirname(mine)
tried("abstract socket", lambda: socket.socket(socket.AF_UNIX).connect(abstract))
tried("connect", lambda: socket.socket().connect(("127.0.0.1", 1)))
print(json.dumps(found))
"""


def system_has(version):
    try:
        return syscalls.landlock_version() >= version
    except (OSError, AttributeError):
        return False


@pytest.fixture
def enforced(tmp_path):
    for name in ("mine", "other"):
        (tmp_path / name / "empty").mkdir(parents=True)
        (tmp_path / name / "kept").write_text("kept")
        (tmp_path / name / "moved").write_text("moved")

    def run(network, version):
        if sys.platform != "linux" or not system_has(max(version, 4)):
            pytest.skip("this system has no such Landlock")
        arguments = [tmp_path / "mine", tmp_path / "other", int(network), version]
        command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"\0{tmp_path}")
            server.listen()
            done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_only_the_given_directories_are_writable(enforced, tmp_path):
    found = enforced(False, 0)
    assert {what for name, what in found.items() if name.startswith("other ")} == {"done", "EACCES"}
    assert [name for name, what in found.items() if what == "done" and name.startswith("other")] == [
        "other read"
    ]
    reaches = "EPERM" if system_has(6) else "done"
    assert {name: found[name] for name in found if name.split()[0] not in ("mine", "other")} == {
        "descriptors": 0, "another folder": "done", "device": "done", "connect": "EACCES",
        "signal": reaches, "abstract socket": reaches,
        "not protected": [
            *("/dev/shm", "SysV memory", "priorities of processes"),
            *([] if system_has(6) else ["signals to processes"]),
            *("UDP", "local sockets"),
        ],
    }  # fmt: skip
    assert {what for name, what in found.items() if name.startswith("mine")} == {"done"}
    assert sorted(os.listdir(tmp_path / "other")) == ["empty", "kept", "moved"]
    assert (tmp_path / "other/kept").read_text() == "kept"


@pytest.mark.parametrize(
    ("version", "network", "expected", "open_besides"),
    [
        (1, False, ["EACCES", "EXDEV", "done", "ECONNREFUSED", "done"], {"signals to processes", "TCP"}),
        (2, False, ["EACCES", "done", "done", "ECONNREFUSED", "done"], {"signals to processes", "TCP"}),
        (3, False, ["EACCES", "done", "EACCES", "ECONNREFUSED", "done"], {"signals to processes", "TCP"}),
        (4, False, ["EACCES", "done", "EACCES", "EACCES", "done"], {"signals to processes"}),
        (4, True, ["EACCES", "done", "EACCES", "ECONNREFUSED", "done"], {"signals to processes"}),
        (6, True, ["EACCES", "done", "EACCES", "ECONNREFUSED", "EPERM"], set()),
    ],
)
def test_each_version_of_the_interface_refuses_what_it_knows(
    enforced, version, network, expected, open_besides
):
    found = enforced(network, version)
    assert [
        found[name] for name in ("other write", "another folder", "other truncate", "connect", "signal")
    ] == expected
    assert open_besides == set(found["not protected"]) & {"signals to processes", "TCP"}
