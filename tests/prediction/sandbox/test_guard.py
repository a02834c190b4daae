"""Hooks refuse what would change a file elsewhere, start a program or reach another machine."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs POSIX")

PROGRAM = """
import json, os, pty, shutil, socket, sqlite3, subprocess, sys
from memtriage.prediction.sandbox import guard, redirect

mine, other = sys.argv[1:]
found = {}

def tried(name, call):
    try:
        call()
        found[name] = "done"
    except OSError as error:
        found[name] = type(error).__name__ if error.errno else str(error)

def opened(path, mode):
    with open(path, mode) as file:
        return file.read() if mode == "r" else file.write("x")

guard.refuse_files_and_processes(mine)
os.chdir(other)
reader = os.open("kept", os.O_RDONLY)
for place in (mine, other, mine + "-not"):
    here = os.path.basename(place)
    at = lambda name: os.path.join(place, name)
    tried(f"{here} read", lambda: opened(at("kept"), "r"))
    tried(f"{here} write", lambda: opened(at("kept"), "w"))
    tried(f"{here} make", lambda: os.open(at("made"), os.O_WRONLY | os.O_CREAT))
    tried(f"{here} sqlite", lambda: sqlite3.connect(at("base")))
    for name, call in {
        "chmod": lambda: os.chmod(at("kept"), 0o600), "chown": lambda: os.chown(at("kept"), -1, -1),
        "mkdir": lambda: os.mkdir(at("new")), "rmdir": lambda: os.rmdir(at("new")),
        "utime": lambda: os.utime(at("kept")), "truncate": lambda: os.truncate(at("kept"), 0),
        "symlink": lambda: os.symlink(other, at("link")), "link": lambda: os.link(at("kept"), at("hard")),
        "rename": lambda: os.rename(at("kept"), at("moved")), "remove": lambda: os.remove(at("moved")),
        "setxattr": lambda: os.setxattr(at("hard"), "user.a", b""),
        "removexattr": lambda: os.removexattr(at("hard"), "user.a"),
    }.items():
        tried(f"{here} {name}", call)
tried("into", lambda: os.rename(os.path.join(mine, "hard"), "stolen"))
tried("out of", lambda: os.rename("kept", os.path.join(mine, "stolen")))
tried("relative", lambda: opened("kept", "a"))
tried("bytes", lambda: opened(b"kept", "a"))
tried("descriptor", lambda: os.truncate(reader, 0))
tried("device", lambda: opened(os.devnull, "w"))
redirect.opening.redirected = True
tried("redirected", lambda: open("kept", "a").close())
tried("not by open", lambda: os.open("kept", os.O_WRONLY))
redirect.opening.redirected = False
for name, call in {
    "Popen": lambda: subprocess.Popen(["true"]), "system": lambda: os.system("true"),
    "execv": lambda: os.execv("/bin/true", ["true"]), "spawn": lambda: pty.spawn(["true"]),
    "posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
}.items():
    tried(name, call)
print(json.dumps(found))
"""
NETWORK = """
import json, os, socket
from memtriage.prediction.sandbox import guard

def tried(call, *arguments):
    try:
        return call(*arguments) and "done"
    except OSError as error:
        return str(error) if error.errno is None else "reached"

guard.refuse_network()
udp, tcp = socket.socket(type=socket.SOCK_DGRAM), socket.socket()
local = socket.socket(socket.AF_UNIX)
print(json.dumps([
    tried(tcp.connect, ("192.0.2.1", 9)),
    tried(tcp.connect, ("127.0.0.1", 1)),
    tried(udp.sendto, b"x", ("192.0.2.1", 9)),
    tried(udp.sendto, b"x", ("127.1.2.3", 9)),
    tried(udp.sendmsg, [b"x"], [], 0, ("192.0.2.1", 9)),
    tried(socket.socket(socket.AF_INET6).connect, ("::1", 1)),
    tried(local.connect, "none"),
    tried(socket.getaddrinfo, "example.invalid", 80),
    tried(socket.getaddrinfo, "localhost", 80),
    tried(socket.getaddrinfo, None, 80),
    tried(socket.gethostbyname, "example.invalid"),
    tried(socket.gethostbyname, "127.0.0.1"),
    tried(socket.getaddrinfo, os.uname().nodename, 80) in ("done", "reached"),
]))
"""


CHANGES = {
    "chmod": "kept", "chown": "kept", "mkdir": "new", "rmdir": "new", "utime": "kept", "truncate": "kept",
    "symlink": "link", "remove": "moved", "setxattr": "hard", "removexattr": "hard",
}  # fmt: skip
REFUSED = {
    "read": "done",
    "write": "a trace writes no file: '/PLACE/kept' was to be opened for writing",
    "make": "a trace writes no file: '/PLACE/made' was to be opened for writing",
    "sqlite": "a trace changes no file: sqlite3.connect('/PLACE/base',)",
    **{name: f"a trace changes no file: os.{name}('/PLACE/{file}',)" for name, file in CHANGES.items()},
    "link": "a trace changes no file: os.link('/PLACE/kept', '/PLACE/hard')",
    "rename": "a trace changes no file: os.rename('/PLACE/kept', '/PLACE/moved')",
}


def ran(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_only_the_scratch_directory_changes_and_no_program_starts(tmp_path):
    folders = [tmp_path / name for name in ("mine", "other", "mine-not")]
    for folder in folders:
        folder.mkdir()
        (folder / "kept").write_text("kept")
    found = ran(PROGRAM, *folders[:2])
    found = {name: text.replace(str(tmp_path), "") for name, text in found.items()}
    for place in ("other", "mine-not"):
        refused = {name: found.pop(f"{place} {name}") for name in REFUSED}
        assert refused == {name: text.replace("PLACE", place) for name, text in REFUSED.items()}
    assert {found.pop(f"mine {name}") for name in REFUSED} == {"done"}
    assert found == {
        "into": "a trace changes no file: os.rename('/mine/hard', 'stolen')",
        "out of": "a trace changes no file: os.rename('kept', '/mine/stolen')",
        "relative": "a trace writes no file: 'kept' was to be opened for writing",
        "bytes": "a trace writes no file: b'kept' was to be opened for writing",
        "descriptor": "OSError",
        "device": "done",
        "redirected": "done",
        "not by open": "a trace writes no file: 'kept' was to be opened for writing",
        "Popen": "a trace starts no other program on this system: ('true', ['true'])",
        "system": "a trace starts no other program on this system: (b'true',)",
        "execv": "a trace starts no other program on this system: ('/bin/true', ['true'])",
        "spawn": "a trace starts no other program on this system: (['true'],)",
        "posix_spawn": "a trace starts no other program on this system: ('/bin/true', ['true'])",
    }
    for folder in folders[1:]:
        assert os.listdir(folder) == ["kept"] and (folder / "kept").read_text() == "kept"


def test_only_this_machine_is_reached():
    off, unknown = (
        f"the network is off in a trace: {where}; see --allow-network"
        for where in ("('192.0.2.1', 9)", "'example.invalid'")
    )
    assert ran(NETWORK) == [
        off, "reached", off, "done", off, "reached", "reached", unknown, "done", "done", unknown, "done",
        True,
    ]  # fmt: skip
