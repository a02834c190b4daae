"""Shows every entry of the playbook at work: `run.py [--only M5 M6] [--device cpu|cuda] [--out FILE]`.

Each entry gets one row: the symptom, what memtriage said, the fix and its effect. An entry that fails becomes
a row with its error. Estimates and whatever is not timed run at once, what is timed runs alone after them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import table
from programs import RUNGS
from row import Row
from scenarios import SCENARIOS
from scenarios.ladder import BEFOREHAND

import memtriage

LIBRARIES = ("torch", "transformers", "peft", "torchao")
RESULTS = Path(__file__).parent / "results"
FILES = {"cpu": "cpu.json", "cuda": "h200.json"}


def main() -> None:
    options = arguments()
    if options.list:
        for entry in SCENARIOS:
            print(f"{entry:4} {Row(entry, '', '', '', '').title}")
        return
    entries = options.only or list(SCENARIOS)
    began = time.monotonic()
    result = {**surroundings(options.device), "rows": []}
    rows = kept(options.out, result) if options.only else {}

    def keep(entry: str, row: dict[str, Any]) -> None:
        rows[entry] = row
        result["rows"] = [rows[each] for each in SCENARIOS if each in rows]
        result["seconds"] = round(sum(each["seconds"] for each in rows.values()), 1)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
        told = row.get("error") or f"{row['said'][:100]} | {row['effect']} | predicted {row['predicted']}"
        print(f"{time.monotonic() - began:6.1f} s  {entry:4} {told}", flush=True)

    rungs = [entry for entry in entries if entry in RUNGS]
    untimed = [entry for entry in entries if entry not in RUNGS]
    with ThreadPoolExecutor(options.at_a_time) as pool:
        BEFOREHAND.begin(rungs, pool)
        for done in as_completed([pool.submit(attempt, entry, options.device) for entry in untimed]):
            keep(*done.result())
    for entry in BEFOREHAND.measure(rungs, options.device):
        keep(*attempt(entry, options.device))
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    if options.write:
        table.write()


def kept(file: Path | None, now: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of an earlier run into the same file, by entry, if it had the same hardware and versions."""
    if file is None or not file.exists():
        return {}
    before = json.loads(file.read_text())
    same = before["hardware"] == now["hardware"] and all(
        before["versions"].get(name) == now["versions"][name] for name in LIBRARIES
    )
    return {row["entry"]: row for row in before["rows"]} if same else {}


def attempt(entry: str, device: str) -> tuple[str, dict[str, Any]]:
    """An entry and its row, which has an error where the scenario failed."""
    began = time.monotonic()
    try:
        row = {**dataclasses.asdict(SCENARIOS[entry](device)), "error": None}
    except Exception as error:  # the other entries are still to come
        traceback.print_exc(file=sys.stderr)
        row = {"entry": entry, "error": f"{type(error).__name__}: {error}", "named": False}
    return entry, {**row, "date": time.strftime("%Y-%m-%d"), "seconds": round(time.monotonic() - began, 1)}


def surroundings(device: str) -> dict[str, Any]:
    """Date, hardware and versions."""
    versions = {"python": platform.python_version(), "memtriage": memtriage.__version__}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "hardware": _hardware(device),
        "versions": versions,
    }


def _hardware(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPU cores, {platform.machine()}"


def arguments() -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="ENTRY", choices=list(SCENARIOS), help="these entries")
    parser.add_argument(
        "--device", choices=list(FILES), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, help="where the JSON goes, after every entry")
    parser.add_argument("--write", action="store_true", help="results/ and the table of README.md as well")
    parser.add_argument("--list", action="store_true", help="print the entries, and end")
    parser.add_argument("--at-a-time", type=int, default=max(2, (os.cpu_count() or 2) - 2))
    options = parser.parse_args()
    if options.write and options.out is None:
        options.out = RESULTS / FILES[options.device]
    return options


if __name__ == "__main__":
    main()
