import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from memtriage.cli import app, doctor

GiB = 1024**3


def by_name(facts):
    return {fact.name: fact for fact in facts}


def settings(torch=(2, 13), **env):
    return by_name(doctor.settings(env, torch))


def test_terminal(capsys):
    assert app.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for heading in ("versions", "devices", "limits", "settings", "capabilities"):
        assert f"\n{heading}\n" in f"\n{out}"
    assert "to change" in out.splitlines()[-1]


def test_json(capfdbinary):
    assert app.main(["doctor", "--json"]) == 0
    report = json.loads(capfdbinary.readouterr().out)
    assert report["schema"] == 1
    names = [fact["name"] for fact in report["facts"]]
    assert len(names) == len(set(names))
    assert {"memtriage", "python", "torch", "host memory", "MemTotal", "/dev/shm", "RLIMIT_AS"} <= set(names)
    for fact in report["facts"]:
        assert set(fact) == {"section", "name", "value", "status", "advice"}
        assert fact["status"] in ("ok", "note", "bad")
        assert (fact["advice"] is None) == (fact["status"] == "ok")


def test_without_torch_it_says_so():
    code = "import sys; sys.modules['torch'] = None; from memtriage.cli.app import main; main(['doctor'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "not importable" in done.stdout
    assert "/dev/shm" in done.stdout


def test_versions_of_a_torch_that_is_too_old():
    torch = SimpleNamespace(__version__="2.7.1+cu126", version=SimpleNamespace(cuda="12.6", hip=None))
    facts = by_name(doctor.versions(torch))
    assert facts["torch"].status == "bad"
    assert facts["CUDA of torch"].value == "12.6"


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_AVOID_RECORD_STREAMS"])
def test_settings_worth_a_word(name):
    assert settings()[name].status == "ok"
    assert settings(**{name: "1"})[name].status == "note"


def test_allocator_settings_that_contradict_each_other():
    both = settings(PYTORCH_CUDA_ALLOC_CONF="a:1", PYTORCH_ALLOC_CONF="a:2")
    assert both["PYTORCH_CUDA_ALLOC_CONF"].value == "a:1"
    assert both["PYTORCH_ALLOC_CONF"].value == "a:2"
    assert {both[name].status for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")} == {"bad"}
    same = settings(PYTORCH_CUDA_ALLOC_CONF="a:1", PYTORCH_ALLOC_CONF="a:1")
    assert {same[name].status for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")} == {"ok"}


def test_new_settings_name_under_an_old_torch():
    assert settings(torch=(2, 9), PYTORCH_ALLOC_CONF="a:1")["PYTORCH_ALLOC_CONF"].status == "note"
    assert settings(torch=(2, 10), PYTORCH_ALLOC_CONF="a:1")["PYTORCH_ALLOC_CONF"].status == "ok"


def test_caching_is_off_whatever_the_value():
    name = "PYTORCH_NO_CUDA_MEMORY_CACHING"
    assert settings()[name].status == "ok"
    assert settings(**{name: "0"})[name].status == "bad"


def test_another_malloc():
    fact = settings(LD_PRELOAD="/usr/lib/libjemalloc.so.2")["LD_PRELOAD"]
    assert fact.status == "note"
    assert "jemalloc" in fact.advice
    assert settings(LD_PRELOAD="/usr/lib/libother.so")["LD_PRELOAD"].status == "ok"


def test_shared_memory():
    assert doctor.shared_memory(64 * 1024**2, 0).status == "bad"
    assert doctor.shared_memory(16 * GiB, GiB).value == "16.0 GiB, 1.0 GiB in use"
    assert doctor.shared_memory(None, None).value == "none"


def test_resource_limits():
    unlimited = by_name(doctor.resource_limits(None, None))
    assert {fact.value for fact in unlimited.values()} == {"no limit"}
    limited = by_name(doctor.resource_limits(8 * GiB, 64 * 1024))
    assert (limited["RLIMIT_AS"].status, limited["RLIMIT_MEMLOCK"].status) == ("bad", "note")


@pytest.mark.parametrize(
    ("text", "value", "status"),
    [
        ("always [madvise] never\n", "madvise", "ok"),
        ("[always] madvise never\n", "always", "note"),
        ("what", "n/a", "ok"),
    ],
)
def test_huge_pages(text, value, status):
    fact = doctor.huge_pages(text)
    assert (fact.value, fact.status) == (value, status)
