"""System calls that Python has no function for: they do what they say or raise the system's error."""

import errno
import os
import sys

import pytest

from memtriage.prediction.sandbox import syscalls

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="system calls of Linux")


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
