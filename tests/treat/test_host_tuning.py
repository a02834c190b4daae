"""What malloc keeps goes back when asked for, and stays away under the settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import memtriage
from memtriage.observe.malloc import malloc_info
from memtriage.treat import host_tuning
from memtriage.treat.host_tuning import MALLOC_SETTINGS, Trimmed, is_tuned, tuned_environment

MIB = 1 << 20
needs_glibc = pytest.mark.skipif(malloc_info() is None, reason="malloc is not glibc's")
UNTUNED = {name: value for name, value in os.environ.items() if name not in MALLOC_SETTINGS}

KEEPING = """
import memtriage
from memtriage.observe.host import rss
large = bytearray(30_000_000)
del large  # from here on blocks of this size lie on the heap
start = rss()
blocks = [bytearray(b"x") * 400_000 for _ in range(300)]
del blocks[:-1]
kept = rss() - start
print(kept, memtriage.malloc_trim().returned)
"""


def keeping(environment: dict[str, str]) -> tuple[int, int]:
    """Bytes that stay after 120 MB were freed, and what a trim returned of them."""
    done = subprocess.run(
        [sys.executable, "-c", KEEPING], env=environment, capture_output=True, text=True, check=True
    )
    kept, returned = map(int, done.stdout.split())
    return kept, returned


@needs_glibc
def test_a_trim_returns_what_was_freed() -> None:
    kept, returned = keeping(UNTUNED)
    assert kept > 100_000_000
    assert 100_000_000 < returned <= kept + 5 * MIB


@needs_glibc
def test_with_the_settings_nothing_is_kept() -> None:
    kept, returned = keeping(tuned_environment(UNTUNED))
    assert kept < 10_000_000
    assert returned < 10_000_000


def test_the_users_own_settings_stay() -> None:
    environment = tuned_environment({"MALLOC_ARENA_MAX": "8", "HOME": "/home/me"})
    assert environment == {**MALLOC_SETTINGS, "MALLOC_ARENA_MAX": "8", "HOME": "/home/me"}
    assert is_tuned(environment)
    assert not is_tuned({"MALLOC_ARENA_MAX": "8"})


def test_the_settings_are_handed_out_as_a_copy() -> None:
    memtriage.malloc_settings().clear()
    assert memtriage.malloc_settings() == MALLOC_SETTINGS


def test_where_malloc_is_another_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tuning, "malloc_info", lambda: None)
    monkeypatch.setattr(host_tuning, "trim", lambda: False)
    trimmed = memtriage.malloc_trim()
    assert not trimmed.supported and trimmed.returned == 0
    monkeypatch.setattr(os, "execve", lambda *arguments: pytest.fail("started anew for nothing"))
    host_tuning.restart_tuned()


def test_a_process_that_has_the_settings_is_not_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MALLOC_SETTINGS:
        monkeypatch.setenv(name, "131072")
    monkeypatch.setattr(os, "execve", lambda *arguments: pytest.fail("started anew for nothing"))
    host_tuning.restart_tuned()


def test_what_grew_meanwhile_is_not_returned() -> None:
    assert Trimmed(10 * MIB, 12 * MIB, supported=True).returned == 0
    assert Trimmed(None, None, supported=True).returned == 0


@needs_glibc
def test_a_run_is_started_anew_once_with_the_settings(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os, sys\n"
        f"settings = [os.environ.get(name) for name in {list(MALLOC_SETTINGS)}]\n"
        "print(json.dumps([sys.argv[1:], os.getpid(), settings]))\n"
        "sys.exit(3)\n"
    )
    command = [sys.executable, "-X", "utf8", "-m", "memtriage", "run", "--host-tuning", "-o", "record"]
    with subprocess.Popen(
        [*command, str(script), "--host-tuning", "a b"],
        env=UNTUNED,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 3
    arguments, pid, settings = json.loads(output)
    assert arguments == ["--host-tuning", "a b"]
    assert pid == process.pid
    assert settings == list(MALLOC_SETTINGS.values())
