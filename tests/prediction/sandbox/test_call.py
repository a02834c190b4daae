"""A call in a process of its own: how it fails, what it leaves running and where its output goes."""

import os
import time
from pathlib import Path

import pytest

from memtriage.prediction.sandbox.call import TimedOut, TraceFailed

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs POSIX")


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


def test_another_error_comes_with_its_traceback(sandboxed):
    with pytest.raises(TraceFailed, match="with status 1") as raised:
        sandboxed("raise KeyError('x')")
    assert "KeyError: 'x'" in raised.value.output


def test_output_is_kept_aside_unless_asked_for(sandboxed, tmp_path, capfd):
    sandboxed("print('loss 1.0')")
    assert capfd.readouterr() == ("", "")
    with open(tmp_path / "shown", "wb") as shown:
        sandboxed("print('loss 1.0')", output=shown.fileno())
    assert (tmp_path / "shown").read_text() == "loss 1.0\n"


def test_a_module_beside_the_caller_hides_none_of_ours(sandboxed):
    Path("msgspec.py").write_text("raise SystemExit(7)")
    try:
        assert sandboxed("seen.append('fine')").seen == ["fine"]
    finally:
        Path("msgspec.py").unlink()


def test_a_program_that_never_ends_is_stopped_and_what_it_reached_is_said(sandboxed, monkeypatch):
    body = """
    from memtriage.prediction.sandbox.child import report_progress
    report_progress("in step 3 of 4")
    while True:
        pass
    """
    seconds = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)

    def progress(text: str, since: float) -> None:
        nonlocal seconds
        if text == "in step 3 of 4":
            seconds = 1800.5

    with pytest.raises(TimedOut, match=r"^the trace was stopped after 30 min 00 s, in step 3 of 4$"):
        sandboxed(body, progress=progress, timeout_s=1800)
