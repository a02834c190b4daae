import gzip
import json
import os
import re

import pytest

from memtriage.cli import app
from memtriage.store.layout import RankIdentity, record_path
from memtriage.store.records import EVIDENCE, End, RecordedFinding, Start
from memtriage.store.writer import RankWriter
from support.observed import BASE, held, observed
from support.runs import step_mark

MiB = 1024**2


def write_rank(top, rank, world_size, *, leaking=False, end=True, run="job"):
    with RankWriter(record_path(top, RankIdentity(run, 0, rank, world_size, rank))) as writer:
        writer.write(
            "start", Start(run_id=run, rank=rank, world_size=world_size, time=1.0, argv=["train.py"])
        )
        for step in range(1, 5):
            writer.write("mark", step_mark(step, step * MiB, rank))
        if leaking:
            finding = RecordedFinding(
                kind="leak", device="cuda:0", rank=rank, holder="losses[*]", bytes_per_step=MiB, final=end
            )
            writer.write("finding", finding)
        if end:
            writer.write("end", End(verdict="leak" if leaking else "clean", steps=4, time_s=4.0))


def test_terminal_report(tmp_path, capsys):
    write_rank(tmp_path / "out", 0, 2)
    write_rank(tmp_path / "out", 1, 2, leaking=True)
    assert app.main(["report", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("LEAK: 1.0 MiB per step on cuda:0\n")
    assert "leak on cuda:0, rank 1 only" in out
    assert "losses[*]" in out


def test_redacted_report_names_no_path_host_or_argument(tmp_path, capsys):
    write_evidence(tmp_path / "out", argv=["/home/ann/train.py", "--project", "moonshot"], host="node7.corp")
    page = tmp_path / "page.html"
    assert app.main(["report", str(tmp_path / "out"), "--redact", "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert app.main(["report", str(tmp_path / "out"), "--redact", "--json"]) == 0
    data = page.read_text().partition('type="application/json"')[2].partition("</script>")[0]
    for text in (shown, capsys.readouterr().out, data):
        for secret in ("ann", "moonshot", "node7", "corp", str(tmp_path)):
            assert not re.search(rf"\b{re.escape(secret)}\b", text), secret
        assert "kept[*]" in text


def test_json_alone_on_stdout(tmp_path, capfdbinary):
    write_rank(tmp_path / "out", None, 1)
    assert app.main(["report", str(tmp_path / "out"), "--json"]) == 0
    out, err = capfdbinary.readouterr()
    assert err == b""
    report = json.loads(out)
    assert (report["schema"], report["verdict"], report["steps"]) == (1, "clean", 4)
    assert len(report["marks"]) == 4


def test_the_page_is_written_beside_the_report(tmp_path, capsys):
    write_rank(tmp_path / "node0", 0, 2)
    write_rank(tmp_path / "node1", 1, 2, leaking=True)
    directories = [str(tmp_path / "node0"), str(tmp_path / "node1")]
    assert app.main(["report", *directories]) == 0
    plain = capsys.readouterr()
    assert app.main(["report", *directories, "--html", str(tmp_path / "run.html")]) == 0
    assert capsys.readouterr() == (plain.out, f"wrote {tmp_path / 'run.html'}\n")
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "losses[*]" in page and "rank 1 only" in page


@pytest.mark.parametrize("option", ["--html", "--bundle"])
@pytest.mark.parametrize("where", ["absent/run", "out"])
def test_a_file_that_cannot_be_written_is_one_line(where, option, tmp_path, refused):
    write_rank(tmp_path / "out", None, 1)
    line = refused("report", str(tmp_path / "out"), option, str(tmp_path / where))
    assert line.startswith(f"memtriage report: {tmp_path / where}: ")


def write_evidence(top, *, leaking=True, **start):
    """Write a run of 60 steps that was found clean, whose list and counter grow by 1 MiB per step or not."""
    rate = MiB if leaking else 0
    evidence = observed(
        {"cpu": [BASE + rate * at for at in range(60)]}, lambda at: [held(rate * at, at)], (20, 40, 60)
    )
    with RankWriter(record_path(top, RankIdentity("job", 0, None, 1, 0))) as writer:
        writer.write("start", Start(run_id="job", time=1.0, **start))
        for step in range(1, 61):
            writer.write("mark", step_mark(step, MiB))
        for line in (*evidence.run["step"].new_readings(last=True), *evidence.run["step"].censuses):
            writer.write(EVIDENCE[type(line)], line)
        writer.write("situation", evidence.situation)
        writer.write("end", End(verdict="clean", steps=60, time_s=60.0))


def reported(capfdbinary, *arguments):
    """Status and JSON of `memtriage report`."""
    assert app.main(["report", *map(str, arguments), "--json"]) == 0
    return json.loads(capfdbinary.readouterr().out)


def test_a_record_is_judged_again(tmp_path, capfdbinary):
    write_evidence(tmp_path / "out")
    report = reported(capfdbinary, tmp_path / "out")
    (leak,) = report["findings"]
    assert (report["verdict"], leak["certainty"], leak["bytes_per_step"]) == ("leak", "proven", MiB)
    assert leak["holder"] == "kept[*]"


def test_the_judgment_of_that_day_can_be_shown(tmp_path, capfdbinary):
    write_evidence(tmp_path / "out")
    report = reported(capfdbinary, tmp_path / "out", "--as-recorded")
    assert (report["verdict"], report["findings"]) == ("clean", [])


def test_a_record_without_evidence_is_shown_as_it_was_judged(tmp_path, capfdbinary):
    write_rank(tmp_path / "out", None, 1, leaking=True)
    assert reported(capfdbinary, tmp_path / "out") == reported(capfdbinary, tmp_path / "out", "--as-recorded")


def test_a_bundle_is_reported_like_its_run(tmp_path, capfdbinary):
    write_evidence(tmp_path / "out")
    bundle = tmp_path / "run.gz"
    report = reported(capfdbinary, tmp_path / "out", "--redact", "--bundle", bundle)
    assert reported(capfdbinary, bundle) == report
    assert report["verdict"] == "leak"


def test_a_bundle_is_redacted(tmp_path, capsys):
    write_evidence(tmp_path / "out", argv=["/home/ann/train.py", "--project", "moonshot"], host="node7.corp")
    bundle = tmp_path / "run.gz"
    assert app.main(["report", str(tmp_path / "out"), "--bundle", str(bundle)]) == 0
    assert f"memtriage report {bundle}" in capsys.readouterr().err
    text = gzip.decompress(bundle.read_bytes()).decode()
    assert "train.py" in text
    for secret in ("ann", "moonshot", "node7", str(tmp_path)):
        assert secret not in text


@pytest.mark.parametrize("length", [2, 10, 100])
def test_a_cut_bundle_is_one_line(length, tmp_path, refused):
    write_evidence(tmp_path / "out")
    bundle = tmp_path / "run.gz"
    assert app.main(["report", str(tmp_path / "out"), "--bundle", str(bundle)]) == 0
    bundle.write_bytes(bundle.read_bytes()[:length])
    assert refused("report", str(bundle)).startswith(f"memtriage report: {bundle}: ")


@pytest.mark.parametrize("what", ["absent", "empty", "garbled", "forbidden"])
def test_what_cannot_be_read_is_one_line(what, tmp_path, refused):
    path = tmp_path / "out"
    if what != "absent":
        path.mkdir()
    if what == "garbled":
        (path / "rank-00000.jsonl").write_bytes(os.urandom(64))
    if what == "forbidden":
        (path / "rank-00000.jsonl").mkdir()
    line = refused("report", str(path))
    assert line.startswith("memtriage report: ") and str(path) in line
