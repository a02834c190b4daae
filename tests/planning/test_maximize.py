"""Which size of a program is set, and what is said of the largest."""

from __future__ import annotations

from typing import Any

import pytest

from memtriage.model.plan import SizedProgram
from memtriage.model.target import TraceTarget
from memtriage.planning.maximize import maximize

BATCH, LENGTH = ("build", "micro_batch", 8), ("step", "seq_len", 512)


def of_build(target: TraceTarget, options: dict[str, Any]) -> SizedProgram:
    """A build function that needs 1,000 bytes, and one for each token of each sample."""
    given = options.get("arguments", {"build": {}, "step": {}})
    batch = given["build"].get("micro_batch", 8)
    length = given["step"].get("seq_len", 512)
    return SizedProgram(
        needs=1000 + batch * length, keywords={"batch": BATCH, "seq": LENGTH}, notes=["assumed"]
    )


def of_script(target: TraceTarget, options: dict[str, Any]) -> SizedProgram:
    words = target.arguments
    return SizedProgram(needs=1000 + int(words[words.index("--batch-size") + 1]) * 10)


BUILD = TraceTarget(name="train.py:build")


def leaving(room: int) -> int:
    """The least budget of which so many bytes may be used: 1 % of it stays free."""
    return next(size for size in range(room, 2 * room) if size - round(size / 100) >= room)


def test_the_largest_batch_of_a_build_function() -> None:
    found = maximize(BUILD, leaving(1000 + 512 * 20), ["batch"], of_build)
    (row,) = found.found
    assert (row.batch, row.seq, row.needs) == (20, None, 1000 + 512 * 20)
    assert (row.next, row.next_needs) == (21, 1000 + 512 * 21)
    less = maximize(BUILD, leaving(1000 + 512 * 20) - 1, ["batch"], of_build)
    assert less.found[0].batch == 19
    assert (found.maximize, found.notes) == (["batch"], ["assumed"])


def test_the_largest_length_is_a_multiple_of_64_if_the_programs_own_is() -> None:
    (row,) = maximize(BUILD, leaving(1000 + 8 * 1000), ["seq"], of_build).found
    assert (row.batch, row.seq, row.next) == (None, 960, 1024)


def test_the_largest_batch_for_each_length_up_to_where_one_sample_does_not_fit() -> None:
    found = maximize(BUILD, leaving(1000 + 4096), ["batch", "seq"], of_build).found
    assert [(row.seq, row.batch) for row in found] == [
        (128, 32), (256, 16), (512, 8), (1024, 4), (2048, 2), (4096, 1),
    ]  # fmt: skip


def test_each_size_is_traced_once() -> None:
    seen = []

    def trace(target: TraceTarget, options: dict[str, Any]) -> SizedProgram:
        seen.append(str(options))
        return of_build(target, options)

    found = maximize(BUILD, 100_000, ["batch"], trace)
    assert len(seen) == len(set(seen)) == found.traces


@pytest.mark.parametrize(
    "arguments", [["--batch-size", "8"], ["--lr", "1", "--batch-size", "8"], ["--batch-size", "8", "-v"]]
)
def test_the_batch_of_a_script_is_its_argument(arguments: list[str]) -> None:
    target = TraceTarget(name="train.py", arguments=arguments)
    (row,) = maximize(target, leaving(1395), ["batch"], of_script).found
    assert (row.batch, row.needs) == (39, 1390)
    assert target.arguments == arguments


def test_an_argument_may_be_one_word() -> None:
    def trace(target: TraceTarget, options: dict[str, Any]) -> SizedProgram:
        return SizedProgram(needs=int(target.arguments[0].removeprefix("--bs=")))

    target = TraceTarget(module="train", arguments=["--bs=4"])
    (row,) = maximize(target, leaving(100), ["batch"], trace).found
    assert (row.batch, row.next) == (100, 101)


def test_nothing_fits() -> None:
    found = maximize(BUILD, 1000, ["batch"], of_build)
    assert (found.found, found.least_needs) == ([], 1512)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (TraceTarget(name="train.py", arguments=["--lr", "8"]), "the script's arguments have no batch"),
        (TraceTarget(name="train.py", arguments=["--batch-size", "auto"]), "such as --micro-batch 8"),
        (TraceTarget(name="train.py:build"), "has a keyword for batch, such as micro_batch=8"),
    ],
)
def test_a_program_without_such_a_size_says_what_to_give(target: TraceTarget, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        maximize(target, 1000, ["batch"], lambda target, options: SizedProgram(needs=1))


@pytest.mark.parametrize(("training", "own"), [({}, 8), ({"batch": 2, "method": "lora"}, 2)])
def test_the_sizes_of_a_configuration_are_its_options(training: dict[str, Any], own: int) -> None:
    seen: list[int] = []

    def trace(target: TraceTarget, options: dict[str, Any]) -> SizedProgram:
        assert {**target.training, "batch": own} == {**training, "batch": own}
        seen.append(target.training["batch"])
        return SizedProgram(needs=10 * target.training["batch"])

    target = TraceTarget(hf_config="config.json", training=training)
    (row,) = maximize(target, leaving(105), ["batch"], trace).found
    assert (row.batch, row.next) == (10, 11)
    assert seen[0] == own
