"""Record runs of the zoo for `tests/zoo/test_records.py`, which judges them again in seconds.

    python tests/zoo/record.py [--runs 3] [--only WORDS] [--out FOLDER] [--scripts FILE...]

Each script runs under `memtriage run`, each time under a different load of the machine. What growth is judged
from is kept, a compressed file per run; a recorded run is redacted like `memtriage report --redact`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from memtriage.report.redact import redacted
from memtriage.store.bundle import write_bundle
from memtriage.store.reader import read_run

ZOO = Path(__file__).parent
RECORDS = ZOO.parent / "data" / "records"
_TIMEOUT_S = 900


def record(script: Path, number: int, file: Path) -> str:
    """Record one run of a script, with `number` other busy processes; return what came of it."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "memtriage", "run", "-o", f"{folder}/run", str(script)]
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
            run = redacted(read_run([Path(folder, "run")]))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    for rank in run.ranks:
        rank.marks, rank.host, rank.ledgers = [], [], {}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bundle(run, file)
    end = run.ranks[0].end
    return f"{done.returncode} {None if end is None else end.verdict} {file.stat().st_size:,} bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="runs of each script")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--only", default="", help="record scripts whose name contains these letters")
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--scripts", nargs="*", type=Path, help="other scripts than those of the zoo")
    arguments = parser.parse_args()
    scripts = arguments.scripts or [ZOO / name for name in tomllib.loads((ZOO / "truth.toml").read_text())]
    wanted = [script for script in scripts if arguments.only in str(script)]
    for number in range(arguments.first, arguments.first + arguments.runs):
        for script in wanted:
            file = arguments.out / script.parent.name / f"{script.stem}.{number}.jsonl.gz"
            print(script.name, number, record(script.resolve(), number, file), flush=True)


if __name__ == "__main__":
    main()
