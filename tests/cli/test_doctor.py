import json
import subprocess
import sys

from memtriage.cli import app


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
