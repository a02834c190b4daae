"""A comparison of four variants."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtriage.model.trials import TrialsReport
from memtriage.prove.result import make_report
from memtriage.prove.state import ComparisonState
from support.trials import GIB, HEAD, MIB, MORE, trials_of, write_trial


@pytest.fixture
def report(tmp_path: Path) -> TrialsReport:
    """Four variants on two ranks: of `fp8` one rank holds more, `fp8 + large` dies."""
    head = HEAD + 'ranks = 2\nname = "FP8 <refit>"\n'
    trials = trials_of(tmp_path, "bf16", "fp8", "fp8 + phase", "fp8 + large", more=MORE, head=head)
    state = ComparisonState(tmp_path / "out", trials)
    for number, level in enumerate((10.0, 10.4, 9.8)):
        for name, factor, first, second in (
            ("bf16", 1.2, (600 * MIB, 700 * MIB), (600 * MIB, 700 * MIB)),
            ("fp8", 1.0, (9 * GIB, 26 * GIB), (12 * GIB, 26 * GIB)),
            ("fp8 + phase", 1.004 if number else 0.999, (500 * MIB, 560 * MIB), (500 * MIB, 560 * MIB)),
        ):
            write_trial(
                state,
                name,
                number,
                [30.0, factor * level, 1.01 * factor * level],
                ranks={0: [first] * 3, 1: [second] * 3},
                log="loss 2.5\nloss 2.25\n",
            )
    for number in range(2):
        write_trial(state, "fp8 + large", number, outcome="out_of_memory", error="OutOfMemoryError: 2 GiB")
    return make_report(trials, state)
