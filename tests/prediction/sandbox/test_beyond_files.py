"""What a program does to other processes, to shared memory and to the metadata of files, at each level.

Whatever reaches the outside is named in the line about what is not protected.
"""

import ctypes
import os
import subprocess
import sys
import time

import psutil
import pytest

from memtriage.prediction.sandbox.call import TimedOut

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems have one level, of Python code"
)

LEVELS = ("overlay", "landlock", "python")
MARK = "MEMTRIAGE_TEST_PROGRAM"
SIGNALS, PRIORITIES, MEMORY, HOST = "signals", "priorities", "SysV memory", "the host's name"


def processes_of(mark: str) -> list[psutil.Process]:
    """Processes that the program with this mark in its environment has started, or that run it."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            pass
    return found


@pytest.fixture
def mark(monkeypatch, tmp_path) -> str:
    monkeypatch.setenv(MARK, str(tmp_path))
    return str(tmp_path)


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


EFFECTS = """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    victim, key = int(os.environ["VICTIM"]), int(os.environ["KEY"])

    def tried(name, act):
        try:
            act()
            seen.append(name)
        except OSError:
            pass

    tried("signals", lambda: os.kill(victim, 0))
    tried("priorities", lambda: os.setpriority(os.PRIO_PROCESS, victim, 7))
    tried("the host's name", lambda: socket.sethostname(socket.gethostname()))
    tried("memory", lambda: libc.shmget(key, 4096, 0o1600))
    for way in ("root" + os.path.abspath("outside.txt"), "cwd/outside.txt"):
        tried("files", lambda: open(f"/proc/{os.getppid()}/{way}", "w").write("reached"))
    # MS_REMOUNT and MS_BIND: writable again.
    if os.environ["LEVEL"] != "python" and libc.mount(None, b"/", None, 0x1020, None) == 0:
        seen.append("mounts")
"""


@pytest.mark.parametrize("level", LEVELS)
def test_what_reaches_other_processes_and_the_system_is_named(level, sandboxed, monkeypatch):
    libc = ctypes.CDLL(None, use_errno=True)
    key = 0x4D000000 + os.getpid() % 0x1000000
    with subprocess.Popen(["sleep", "600"]) as victim:
        try:
            monkeypatch.setenv("VICTIM", str(victim.pid))
            monkeypatch.setenv("KEY", str(key))
            monkeypatch.setenv("LEVEL", level)
            done = sandboxed(EFFECTS, levels=(level, "python"))
            priority = os.getpriority(os.PRIO_PROCESS, victim.pid)
        finally:
            victim.kill()
    segment = libc.shmget(key, 0, 0)
    if segment != -1:
        libc.shmctl(segment, 0, None)
    reached = {name for name in (SIGNALS, HOST) if name in done.seen}
    reached |= {PRIORITIES} if priority == 7 else set()
    reached |= {MEMORY} if segment != -1 else set()
    note = " ".join(done.notes)
    assert "mounts" not in done.seen
    assert {name for name in reached if name not in note} == set()


DAEMON = """
    from memtriage.prediction.sandbox.child import report_progress
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.write(writing, b"x")
        while True:
            signal.pause()
    seen.append(os.read(reading, 1))
    report_progress("the daemon runs")
"""


ENDLESS = """
    os.write(2, b"running" + bytes([10]))
    signal.pause()
"""


@pytest.mark.parametrize("level", LEVELS)
def test_a_daemon_ends_with_the_program(level, sandboxed, mark):
    assert sandboxed(DAEMON, levels=(level, "python")).seen == ["b'x'"]
    assert processes_of(mark) == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_daemon_ends_with_a_program_that_takes_too_long(level, sandboxed, mark, monkeypatch):
    seconds = 0.0
    running = []
    monkeypatch.setattr(time, "monotonic", lambda: seconds)

    def progress(text: str, since: float) -> None:
        nonlocal seconds
        if text == "the daemon runs":
            running.extend(processes_of(mark))
            seconds = 2.0

    with pytest.raises(TimedOut):
        sandboxed(DAEMON + "    signal.pause()", levels=(level, "python"), progress=progress, timeout_s=1)
    assert len(running) > 2
    assert processes_of(mark) == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_daemon_ends_with_a_caller_that_is_killed(level, tmp_path, mark):
    (tmp_path / "job.py").write_text("import os, signal\ndef program():\n    seen = []" + DAEMON + ENDLESS)
    command = (
        "from memtriage.prediction.sandbox.call import call; "
        f"call('job:program', {{}}, object, wanted=[], output=2, levels=('{level}', 'python'))"
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(
        [sys.executable, "-c", command], stderr=subprocess.PIPE, env=environment, cwd=tmp_path
    ) as caller:
        assert caller.stderr is not None
        assert caller.stderr.readline() == b"running\n"
        running = processes_of(mark)
        caller.kill()
    assert len(running) > 3
    assert psutil.wait_procs(running, timeout=60)[1] == []
