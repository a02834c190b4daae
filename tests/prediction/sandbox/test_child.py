"""The side of a sandboxed call that runs the program: what it sends, and how it ends."""

import os
import signal

import pytest

from memtriage.prediction.sandbox import child

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs POSIX")


def test_a_value_error_is_one_line(sandboxed):
    with pytest.raises(ValueError, match=r"^first second$"):
        sandboxed("raise ValueError('first\\n second')")


def test_closing_all_descriptors_loses_no_answer(sandboxed):
    assert sandboxed("os.closerange(3, 256); seen.append('closed')").seen == ["closed"]


def test_progress_is_passed_on(sandboxed):
    lines = []
    body = """
    from memtriage.prediction.sandbox.child import report_progress
    report_progress("step 1 of 2")
    """
    sandboxed(body, progress=lambda text, seconds: lines.append(text))
    assert list(dict.fromkeys(lines)) == ["before the first step", "step 1 of 2"]


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


def test_progress_outside_a_sandboxed_call_goes_nowhere(capfd):
    child.report_progress("step 1 of 2")
    assert capfd.readouterr() == ("", "")
