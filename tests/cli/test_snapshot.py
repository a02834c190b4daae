"""`memtriage snapshot`, as it is called."""

import json
from pathlib import Path

import pytest

from memtriage.cli import app
from support.refusals import Refused

DATA = Path(__file__).parents[1] / "data" / "snapshots"
LEAK = str(DATA / "loss_list.pickle.gz")
HEALTHY = str(DATA / "healthy.pickle.gz")


def test_the_report_names_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["snapshot", LEAK]) == 0
    shown = capsys.readouterr().out
    assert "1. leak" in shown
    assert "leak  311.2 MiB per step" in shown
    assert "train.py:17 in forward" in shown


def test_a_healthy_recording_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["snapshot", HEALTHY]) == 0
    assert "nothing wrong found" in capsys.readouterr().out


def test_json_is_the_result_alone(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert app.main(["snapshot", LEAK, "--json"]) == 0
    captured = capfdbinary.readouterr()
    result = json.loads(captured.out)
    assert captured.err == b""
    assert result["schema"] == 1
    (device,) = result["devices"]
    expected = {"allocated": 2761948672, "reserved": 3269459968, "segments": 76, "events": 5380}
    assert device.items() >= expected.items()
    assert device["reserved"] == sum(
        device[part] for part in ("requested", "rounding", "releasable", "stranded", "awaiting_free")
    )
    assert device["peak"]["allocated"] == sum(row["bytes"] for row in device["peak"]["owners"])
    (finding,) = device["findings"]
    assert (finding["kind"], finding["device"], finding["bytes_per_step"]) == ("leak", "cuda:0", 326321152)
    assert (finding["holder"], finding["rank"]) == (None, None)


def test_a_page_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert app.main(["snapshot", HEALTHY, "--html", str(page)]) == 0
    assert page.read_text().startswith("<!")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["none.pickle"], "No such file"),
        ([HEALTHY, "--html", "/no/such/folder/page.html"], "No such file"),
        (["/tmp"], "/tmp: Is a directory"),
        ([], "FILE"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], reason: str, refused: Refused) -> None:
    assert reason in refused("snapshot", *arguments)
