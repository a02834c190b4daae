"""M2 and M3: the error's text, and which memory ran out."""

from __future__ import annotations

import json
from pathlib import Path

from row import Row, before_after, finding_text
from tools import HERE, error_line, explain, job, watched

from memtriage.model.units import size

RECORDED = HERE / "results" / "h200.json"
FIELDS = ("requested", "allowed", "allocated", "free", "total")


def m2(device: str) -> Row:
    """A cap refuses on an empty device; the text is decoded and compared with the allocator's counters."""
    cured = None
    if device == "cuda":
        died, cured = job("reading.py"), job("reading.py", "--cured")
    else:
        died = _recorded(RECORDED)
    diagnosis = explain(died["text"])
    fields = diagnosis["fields"]
    first = diagnosis["fixes"][0]
    decoded = ", ".join(f"{name} {size(fields[name])}" for name in FIELDS if fields.get(name) is not None)
    off = abs(fields["allocated"] - died["allocated"])
    return Row(
        entry="M2",
        symptom=f"out of memory at {size(died['requested'])}, with {size(died['allocated'])} of "
        f"{size(died['total'])} allocated"
        + ("" if device == "cuda" else " (text recorded on the H200)"),
        said=f"`memtriage explain`: `{diagnosis['diagnosis']}` ({diagnosis['confidence']:.2f}); "
        f"decoded: {decoded}; "
        f"{first['playbook']}: {first['action']}",
        fix="the cap removed",
        effect="not run: there is no GPU" if cured is None
        else f"dies → runs, {size(cured['allocated'])} allocated",
        predicted=f"allocated as decoded is {size(off)} off the allocator's counter",
        figures={"job": died, "explain": diagnosis, "cured": cured},
        named=first["playbook"] == "M2",
        absent="" if device == "cuda" else "the fix needs a GPU",
    )  # fmt: skip


def _recorded(file: Path) -> dict[str, object]:
    """The text and figures that the GPU's run left.

    Raises:
        LookupError: there was none yet.
    """
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    for row in rows:
        if row["entry"] == "M2" and row.get("figures"):
            return row["figures"]["job"]
    raise LookupError(f"{file} has no text of M2: run this entry on a GPU first")


def m3(device: str) -> Row:
    """The same loading dies on the host, and on the device: opposite fixes."""
    died = watched("dataset.py", "--device", device)
    host = died.finding("out_of_memory")
    text = explain(error_line(died.stderr))
    cured = job("dataset.py", "--device", device, "--cured")
    whole = job("dataset.py", "--device", device, environment={"PLAYBOOK_UNLIMITED": "1"})
    said = f"host: {finding_text(host)}; its text: `{text['diagnosis']}` {text['fixes'][0]['playbook']}"
    figures = {"host": host, "explain": text, "whole": whole, "cured": cured}
    if device == "cuda":
        other = watched("dataset.py", "--keep-on", "device")
        on_device = other.finding("out_of_memory")
        said += f". Device: {finding_text(on_device)}"
        figures["device"] = on_device
    return Row(
        entry="M3",
        symptom="a dataset of 640 MiB is loaded where 400 MiB are left: on the host"
        + (", and on the device" if device == "cuda" else ""),
        said=said,
        fix="the file mapped, not loaded",
        effect=f"dies → runs; {before_after(whole['resident'], cured['resident'])} of anonymous host memory",
        figures=figures,
        named=host["playbook"] == "M3",
    )
