"""The lines of a rank's record: what is there where an older writer has left something out."""

from __future__ import annotations

import msgspec

from memtriage.model.findings import Finding
from memtriage.store.records import SCHEMA, End, HostSampleLine, RecordedFinding, Start


def test_what_is_left_out_is_unknown() -> None:
    start = msgspec.to_builtins(msgspec.json.decode(b"{}", type=Start))
    assert start.pop("schema") == SCHEMA == 2
    assert (start.pop("run_id"), start.pop("restart"), start.pop("world_size"), start.pop("argv")) == (
        "", 0, 1, [],
    )  # fmt: skip
    assert set(start.values()) == {None}
    assert set(msgspec.to_builtins(msgspec.json.decode(b"{}", type=HostSampleLine)).values()) == {None}
    end = msgspec.json.decode(b'{"verdict": "clean"}', type=End)
    assert (end.steps, end.exception, end.exit_code, end.judged, end.peak_rss) == (0, None, None, None, None)
    assert end.device_limits == end.passing == end.peak_allocated == end.peak_reserved == {}


def test_a_finding_is_final_only_where_it_says_so() -> None:
    line = msgspec.json.encode(Finding(kind="leak", device="cpu", bytes=5))
    assert msgspec.json.decode(line, type=RecordedFinding).final is False
    assert msgspec.json.decode(line, type=RecordedFinding).bytes == 5
