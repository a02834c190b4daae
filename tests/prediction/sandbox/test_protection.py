"""Whatever a program writes, at each level of protection the files stay as they were."""

import ctypes
import os
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs POSIX")


@pytest.fixture(params=["overlay", "landlock", "python"])
def level(request) -> str:
    if request.param != "python" and not hasattr(os, "fork"):
        pytest.skip("Linux only")
    return request.param


def run_at(level: str, sandboxed, body: str, **options):
    """Run a program at one level; skip where the system does not have it."""
    done = sandboxed(body, levels=(level, "python"), **options)
    weaker = {"landlock": "allows no overlay", "python": "cannot refuse"}
    if level not in weaker:
        if any(sign in note for note in done.notes for sign in weaker.values()):
            pytest.skip(f"this system has no {level}")
    elif not any(weaker[level] in note for note in done.notes):
        pytest.skip(f"this system has no {level}")
    return done


CHECKPOINTS = """
    open("model.pt", "w").write("new")
    seen.append(open("model.pt").read())
    open("tmp.pt", "w").write("newer")
    os.replace("tmp.pt", "model.pt")
    seen.append(pathlib.Path("model.pt").read_text())
    os.remove("old.pt")
    seen.append(os.path.exists("old.pt"))
    os.makedirs("checkpoints/tmp-2")
    open("checkpoints/tmp-2/model.pt", "w").write("2")
    os.rename("checkpoints/tmp-2", "checkpoints/step-2")
    shutil.rmtree("checkpoints/step-1")
    seen.append(sorted(os.listdir("checkpoints")))
    os.remove("latest")
    os.symlink("checkpoints/step-2", "latest")
    seen.append(open("latest/model.pt").read())
    seen.append(sorted(str(each) for each in pathlib.Path(".").rglob("*.pt")))
"""


def test_checkpoints_are_read_back_and_the_tree_stays_as_it_was(level, sandboxed):
    done = run_at(level, sandboxed, CHECKPOINTS)
    assert done.seen == [
        "new",
        "newer",
        "False",
        "['step-2']",
        "2",
        "['checkpoints/step-2/model.pt', 'model.pt']",
    ]
    line = next(note for note in done.notes if "discarded" in note)
    assert "model.pt" in line and "old.pt" in line


def test_links_cannot_be_used_to_reach_a_file(level, sandboxed):
    done = run_at(
        level,
        sandboxed,
        """
        os.symlink(os.path.abspath("outside.txt"), "link.txt")
        open("link.txt", "a").write(" and more")
        seen.append(open("outside.txt").read())
        os.link("model.pt", "hard.pt")
        open("hard.pt", "w").write("x")
        seen.append(open("hard.pt").read())
        os.truncate("train.log", 3)
        os.chmod("train.log", 0o600)
        """,
    )
    assert done.seen == ["precious outside.txt and more", "x"]


def test_a_subprocess_sees_what_python_code_writes_to_temporary_files(level, sandboxed):
    body = """
        import tempfile
        with tempfile.NamedTemporaryFile("w+") as file:
            file.write("source")
            file.flush()
            try:
                seen.append(subprocess.run(["cat", file.name], capture_output=True, text=True).stdout)
            except PermissionError:
                seen.append("not started")
    """
    assert run_at(level, sandboxed, body).seen == ["not started" if level == "python" else "source"]


def test_loggers_append_to_a_copy(level, sandboxed):
    done = run_at(
        level,
        sandboxed,
        """
        logging.basicConfig(filename="train.log", level=logging.INFO)
        logging.info("step 1")
        seen.append(open("train.log").read().startswith("precious train.log"))
        seen.append("step 1" in open("train.log").read())
        """,
    )
    assert done.seen == ["True", "True"]


def test_torch_and_safetensors_write_and_read_by_native_code(level, sandboxed):
    pytest.importorskip("safetensors")
    done = run_at(
        level,
        sandboxed,
        """
        import numpy, torch
        from safetensors.torch import load_file, save_file
        torch.save({"a": torch.ones(2)}, "model.pt")
        seen.append(torch.load("model.pt")["a"].tolist())
        save_file({"a": torch.zeros(2)}, "model.safetensors")
        seen.append(load_file("model.safetensors")["a"].tolist())
        numpy.save("a.npy", numpy.ones(2))
        seen.append(numpy.load("a.npy").tolist())
        """,
    )
    assert done.seen == ["[1.0, 1.0]", "[0.0, 0.0]", "[1.0, 1.0]"]


def test_a_subprocess_is_under_the_same_rule(level, sandboxed):
    body = """
        try:
            commands = "echo new > model.pt; rm old.pt; echo x > made.txt"
            subprocess.run(commands, shell=True, stderr=subprocess.DEVNULL)
        except OSError as error:
            seen.append("not started")
        seen.append(open("model.pt").read().strip())
    """
    done = run_at(level, sandboxed, body)
    assert (
        done.seen
        == {
            "overlay": ["new"],
            "landlock": ["precious model.pt"],
            "python": ["not started", "precious model.pt"],
        }[level]
    )


@pytest.mark.parametrize("allowed", [False, True])
def test_the_network_is_off_unless_allowed(level, sandboxed, allowed):
    with socket.create_server(("127.0.0.1", 0)) as server:
        body = f"""
        try:
            socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), timeout=5).close()
            seen.append("connected")
        except OSError:
            seen.append("refused")
        """
        done = run_at(level, sandboxed, body, network=allowed)
    # Hooks leave the machine's own address alone: libraries talk to themselves over it.
    assert done.seen == ["connected" if allowed or level == "python" else "refused"]


def test_hooks_refuse_other_machines(sandboxed):
    body = """
        for address in (("192.0.2.1", 9), ("example.invalid", 9)):
            try:
                socket.create_connection(address, timeout=5)
            except OSError as error:
                seen.append("--allow-network" in str(error))
    """
    assert run_at("python", sandboxed, body).seen == ["True", "True"]


NOTES = {
    "overlay": "this system allows no /proc for a trace alone. Not protected: ",
    "landlock": "this system allows no overlay: what a trace writes by other code than Python's is refused. "
    "Not protected: /dev/shm, SysV memory, priorities of processes",
    "python": "this system cannot refuse the writes of a process: hooks keep Python code from changing "
    "files, native code can still write; trace a copy of the program if that matters. Not protected: ",
}


@pytest.mark.parametrize("network", [False, True])
def test_each_level_says_what_it_leaves_open_and_libraries_know_of_the_network(
    level, sandboxed, monkeypatch, network
):
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    body = """
        import tempfile
        with tempfile.NamedTemporaryFile("w+") as file:
            file.write("kept for a moment")
            file.seek(0)
            seen.append(file.read())
        seen.append(os.path.exists(file.name))
        seen.append((os.environ.get("HF_HUB_OFFLINE"), os.environ["WANDB_MODE"]))
        seen.append("TMPDIR" in os.environ and os.environ["TMPDIR"] == tempfile.gettempdir())
    """
    monkeypatch.delenv("TMPDIR", raising=False)
    done = run_at(level, sandboxed, body, network=network)
    offline = None if network else "1"
    (note,) = done.notes or [NOTES["overlay"]]
    assert note.startswith(NOTES[level])
    assert ("UDP" in note) == (level == "landlock" and not network)
    assert done.seen == ["kept for a moment", "False", str((offline, "dryrun")), str(level != "overlay")]


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


@pytest.mark.skipif(sys.platform != "linux", reason="system calls of Linux")
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
    reached = {name for name in ("signals", "the host's name") if name in done.seen}
    reached |= {"priorities"} if priority == 7 else set()
    reached |= {"SysV memory"} if segment != -1 else set()
    note = " ".join(done.notes)
    # What reaches the outside is named in the line about what is not protected.
    assert "mounts" not in done.seen
    assert {name for name in reached if name not in note} == set()
