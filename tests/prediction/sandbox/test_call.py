"""Programs run in the sandbox at each of its levels: whatever they write, the files stay as they were."""

import hashlib
import os
import signal
import socket
import textwrap
from pathlib import Path

import msgspec
import pytest

from memtriage.prediction.sandbox.call import TraceFailed, call

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs POSIX")


class Notes(msgspec.Struct):
    """What the programs of these tests return."""

    notes: list[str]
    seen: list[str] = []


HEAD = """
import logging, os, pathlib, shutil, signal, socket, subprocess, sys
import msgspec
class Notes(msgspec.Struct):
    notes: list[str] = []
    seen: list[str] = []
"""

LEVELS = ("overlay", "landlock", "python")


@pytest.fixture(params=LEVELS)
def level(request) -> str:
    if request.param != "python" and not hasattr(os, "fork"):
        pytest.skip("Linux only")
    return request.param


@pytest.fixture
def sandboxed(tmp_path, monkeypatch):
    """Runs the body of a function in the sandbox, in a folder with some files."""
    folder = tmp_path / "job"
    (folder / "checkpoints/step-1").mkdir(parents=True)
    for name in ("model.pt", "old.pt", "train.log", "checkpoints/step-1/model.pt", "outside.txt"):
        (folder / name).write_text(f"precious {name}")
    (folder / "latest").symlink_to("checkpoints/step-1")
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)

    def run(body: str, **options) -> Notes:
        text = HEAD + "def program():\n    seen = []\n" + textwrap.indent(textwrap.dedent(body), "    ")
        (modules / "job.py").write_text(text + "\n    return Notes(seen=[str(each) for each in seen])\n")
        before = tree(folder)
        try:
            return call("job:program", {}, Notes, wanted=[str(folder)], **options)
        finally:
            assert tree(folder) == before

    return run


def tree(folder: Path) -> dict[str, object]:
    """Every path below a folder, with its kind and contents."""
    return {
        str(path): os.readlink(path)
        if path.is_symlink()
        else (hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None)
        for path in folder.rglob("*")
    }


def run_at(level: str, sandboxed, body: str, **options) -> Notes:
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


def test_child_that_exits_is_reported_with_its_last_output(sandboxed):
    with pytest.raises(TraceFailed, match="with status 3 before") as raised:
        sandboxed("print('last words', flush=True); os._exit(3)")
    assert raised.value.output == "last words"
    with pytest.raises(TraceFailed, match="by SIGKILL"):
        sandboxed("os.kill(os.getpid(), 9)")


def test_of_a_crash_the_innermost_frames_are_shown(sandboxed):
    body = """
    import faulthandler
    faulthandler.enable()
    def deeper(times):
        deeper(times - 1) if times else os.kill(os.getpid(), signal.SIGSEGV)
    print("x" * 10_000, flush=True)
    deeper(90)
    """
    with pytest.raises(TraceFailed, match="by SIGSEGV") as raised:
        sandboxed(body)
    assert raised.value.output.startswith("Fatal Python error: Segmentation fault")
    assert raised.value.output.index("in deeper") < 300


def test_orphans_of_a_child_do_not_keep_the_caller_waiting(sandboxed):
    body = """
    if os.fork() == 0:
        signal.pause()
    os._exit(0)
    """
    with pytest.raises(TraceFailed, match="with status 0"):
        sandboxed(body)


def test_what_a_program_leaves_running_is_ended(sandboxed):
    done = sandboxed("seen.append(subprocess.Popen(['sleep', '600']).pid)")
    pid = int(done.seen[0])
    with pytest.raises(ProcessLookupError):
        for _ in range(100_000):
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                raise ProcessLookupError


def test_a_value_error_is_one_line(sandboxed):
    with pytest.raises(ValueError, match=r"^first second$"):
        sandboxed("raise ValueError('first\\n second')")


def test_another_error_comes_with_its_traceback(sandboxed):
    with pytest.raises(TraceFailed, match="with status 1") as raised:
        sandboxed("raise KeyError('x')")
    assert "KeyError: 'x'" in raised.value.output


def test_closing_all_descriptors_loses_no_answer(sandboxed):
    assert sandboxed("os.closerange(3, 256); seen.append('closed')").seen == ["closed"]


def test_progress_is_passed_on(sandboxed):
    lines = []
    body = """
    from memtriage.prediction.sandbox.child import report_progress
    report_progress("step 1 of 2")
    """
    sandboxed(body, progress=lines.append)
    assert lines == ["step 1 of 2"]


def test_output_is_kept_aside_unless_asked_for(sandboxed, tmp_path, capfd):
    sandboxed("print('loss 1.0')")
    assert capfd.readouterr() == ("", "")
    with open(tmp_path / "shown", "wb") as shown:
        sandboxed("print('loss 1.0')", output=shown.fileno())
    assert (tmp_path / "shown").read_text() == "loss 1.0\n"


def test_the_child_ends_with_its_caller(sandboxed, tmp_path):
    done = sandboxed(
        """
        import ctypes
        value = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(value))  # PR_GET_PDEATHSIG
        seen.append(value.value)
        """
    )
    assert done.seen == [str(int(signal.SIGKILL))]


def test_a_module_beside_the_caller_hides_none_of_ours(sandboxed):
    Path("msgspec.py").write_text("raise SystemExit(7)")
    try:
        assert sandboxed("seen.append('fine')").seen == ["fine"]
    finally:
        Path("msgspec.py").unlink()
