"""Messages of every family are found and read, whatever was done to the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.messages.grammar.find import find
from memtriage.messages.grammar.message import as_printed, figures, printed_unit
from support.message_texts import records

RECORDS = records("oom_messages")
"""Real messages, with the sizes that a reader takes from each."""


def each_line(prefix: str) -> Callable[[str], str]:
    return lambda text: "\n".join(f"{prefix}{line}" for line in text.split("\n"))


def wrapped(width: int, prefix: str = "") -> Callable[[str], str]:
    return lambda text: "\n".join((prefix + text)[i : i + width] for i in range(0, len(prefix + text), width))


DISGUISES: dict[str, Callable[[str], str]] = {
    "as it is": lambda text: text,
    "rank": each_line("[rank3]: "),
    "srun": each_line(" 3: "),
    "mpirun": each_line("[1,5]<stderr>:"),
    "time": each_line("2024-11-20 12:33:44,123 ERROR "),
    "ray": each_line("(RayTrainWorker pid=1234, ip=10.0.0.3) "),
    "engine": each_line("(VllmWorkerProcess pid=99) ERROR 12-20 20:25:46 worker.py:241] "),
    "pod": each_line("[pod/train-3/pytorch] "),
    "wrapped at 60": wrapped(60),
    "wrapped at 33": wrapped(33),
    "colors": lambda text: "\x1b[31m" + text.replace(" ", " \x1b[0m\x1b[1m", 4) + "\x1b[0m",
    "Windows": lambda text: text.replace("\n", "\r\n") + "\r\n",
    "doubled spaces": lambda text: text.replace(" ", "  "),
    "glued": lambda text: f"Failed to update parameters: {text} (step 17)",
    "among prints": lambda text: f"exit code 1\n137 files | 100% done\n{text}\nstep 13 of 99\n",
}


@pytest.mark.parametrize("disguise", DISGUISES)
def test_real_messages_give_their_sizes(disguise: str) -> None:
    wrong = {}
    for record in RECORDS:
        messages = find(DISGUISES[disguise](record["text"]))
        fields = dict(messages[0].message.fields) if messages else None
        families = [each.message.family for each in messages]
        if fields != (record.get("bytes") or {}) or families != [record["family"]]:
            wrong[record["id"]] = (families, fields)
    assert not wrong


def test_a_tagged_message_wrapped_by_a_terminal_is_one() -> None:
    for record in RECORDS:
        if "\n" not in record["text"]:
            messages = find(wrapped(80, "[rank3]: ")(record["text"]))
            assert [each.rank for each in messages] == [3], record["id"]
            assert dict(messages[0].message.fields) == (record.get("bytes") or {}), record["id"]


def test_ranks_interleaved_are_told_apart() -> None:
    """Each rank's half lines are read together, though lines of the other come between."""
    one, other = (
        record
        for record in RECORDS
        if record["family"] == "cuda-v2" and record["id"] in ("oom-043", "oom-051")
    )
    first, second = one["text"], other["text"]
    half = len(first) // 2
    log = (
        f"[rank1]: {first[:half]}\n[rank2]: {second[:half]}\n"
        f"[rank1]: {first[half:]}\n[rank2]: {second[half:]}\n"
    )
    fields = {each.rank: dict(each.message.fields) for each in find(log)}
    assert fields == {1: one["bytes"], 2: other["bytes"]}


def test_equal_messages_about_two_gpus_are_two() -> None:
    text = next(record["text"] for record in RECORDS if "GPU 0" in record["text"])
    log = f"{text}\n{text.replace('GPU 0', 'GPU 1')}\n"
    assert [each.message.device for each in find(log)] == ["cuda:0", "cuda:1"]


SIZES = st.integers(1, 2**40)


@settings(deadline=None)
@given(
    asked=SIZES,
    total=SIZES,
    free=SIZES,
    live=SIZES,
    holes=SIZES,
    pools=st.none() | SIZES,
    device=st.integers(0, 15),
)
def test_a_message_of_any_numbers_is_read_back(
    asked: int, total: int, free: int, live: int, holes: int, pools: int | None, device: int
) -> None:
    graphs = f", with {as_printed(pools)} allocated in private pools (e.g., CUDA Graphs)" if pools else ""
    text = (
        f"CUDA out of memory. Tried to allocate {as_printed(asked)}. GPU {device} has a total capacity of "
        f"{as_printed(total)} of which {as_printed(free)} is free. Of the allocated memory "
        f"{as_printed(live)} is allocated by PyTorch{graphs}, and {as_printed(holes)} is reserved by PyTorch "
        "but unallocated."
    )
    (found,) = find(text)
    read = figures(found.message)
    assert read.device == f"cuda:{device}"
    for name, nbytes in {
        "requested": asked,
        "total": total,
        "free": free,
        "allocated": live,
        "reserved_unallocated": holes,
        "private_pools": pools,
    }.items():
        got = getattr(read, name)
        assert (got is None) == (nbytes is None)
        assert nbytes is None or abs(got - nbytes) <= printed_unit(nbytes) / 200 + 1


WHOLE = next(record for record in RECORDS if record["id"] == "oom-054")


@settings(deadline=None)
@given(st.integers(0, len(WHOLE["text"])))
def test_truncated_message_has_same_or_missing_sizes(end: int) -> None:
    for each in find(WHOLE["text"][:end]):
        for name, value in each.message.fields.items():
            if name != "processes":
                assert value in (None, WHOLE["bytes"][name])
                assert value is not None or name in each.message.missing


@settings(deadline=None)
@given(st.integers(1, len(WHOLE["text"]) - 60))
def test_a_message_without_its_beginning_still_gives_sizes(start: int) -> None:
    for each in find(WHOLE["text"][start:]):
        for name, value in each.message.fields.items():
            if name not in (
                "processes",
                "total",
                "free",
                "allocated",
                "private_pools",
                "reserved_unallocated",
                "requested",
            ):
                continue
            if name != "processes" and isinstance(value, int):
                # The first figure may have lost its leading digits.
                assert value <= WHOLE["bytes"][name]


@settings(deadline=None)
@given(st.binary(max_size=400), st.sampled_from(RECORDS), st.integers(0, 400))
def test_noise_never_matters_to_the_reader(noise: bytes, record: dict[str, Any], at: int) -> None:
    text = record["text"]
    find(text[:at] + noise.decode("utf-8", "replace") + text[at:])


@pytest.mark.parametrize(
    ("text", "family", "fields"),
    [
        (
            "$ Torch: not enough memory: you tried to allocate 0GB. Buy new RAM! posix_memalign(&data, "
            "gAlignment, nbytes) == 0. 12 vs 0",
            "cpu-alloc",
            {},
        ),
        (
            "Out of memory: Kill process 4242 (python) score 900 or sacrifice child\nKilled process 4242 "
            "(python) total-vm:100kB, anon-rss:80kB, file-rss:0kB",
            "kernel-oom",
            {"total_vm": 102400, "anon_rss": 81920, "file_rss": 0},
        ),
    ],
)
def test_a_failure_told_twice_is_one_message(text: str, family: str, fields: dict[str, int]) -> None:
    found = [each.message for each in find(text)]
    assert [message.family for message in found] == [family]
    assert dict(found[0].fields) == fields


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step 137 exit code 0",
        '"OOMKilled": false,',
        "loss 0.137, killed 3 jobs of the queue",
        "allocated 12.3 GiB, reserved 14.0 GiB, out of 80 GiB",
        "memory format option is only supported by strided tensors",
        "GPU KV cache usage: 3.1%",
    ],
)
def test_what_is_no_message(text: str) -> None:
    assert find(text) == []


def test_frames_of_the_traceback_above() -> None:
    log = (
        "Traceback (most recent call last):\n"
        '  File "old.py", line 1, in early\n'
        "KeyError: 1\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "train.py", line 12, in main\n'
        "[rank1]:     loss.backward()\n"
        "[rank0]: step 7\n"
        '[rank1]:   File "/venv/torch/_tensor.py", line 525, in backward\n'
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    (found,) = find(log)
    assert found.line == 9
    assert found.frames == (("/venv/torch/_tensor.py", "backward", 525), ("train.py", "main", 12))


def test_a_message_ends_where_its_last_line_does() -> None:
    text = "CUDA driver error: out of memory\nKilled\n"
    assert [(each.line, each.message.family) for each in find(text)] == [(1, "cuda-driver"), (2, "launcher")]


def test_figures_belong_to_the_message_that_they_are_in() -> None:
    failed = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"
    lines = [
        f"{failed} 1.00 GiB.",
        f"{failed} 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 1.08 GiB is free.",
        f"{failed} 3.00 GiB.",
    ]
    figures = [dict(each.message.fields) for each in find("\n".join(lines))]
    assert [fields["requested"] >> 30 for fields in figures] == [1, 2, 3]
    assert [len(fields) for fields in figures] == [1, 3, 1]


def told(*lines: str) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    found = [each.message for each in find("\n".join(lines))]
    return [(message.family, dict(message.fields), dict(message.facts)) for message in found]


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[rank3]: CUDA error: out of memory", 3),
        ("(Trainer pid=7) CUDA error: out of memory", None),
        ("CUDA error: out of memory", None),
        ("h:1:2 [5] NCCL WARN Cuda failure 'out of memory'", 5),
        ("(Trainer pid=7) h:1:2 [5] NCCL WARN Cuda failure 'out of memory'", 5),
        ("[rank3]: h:1:2 [5] NCCL WARN Cuda failure 'out of memory'", 3),
        ("failed (exitcode: -9) local_rank: 2 (pid: 77)", 2),
    ],
)
def test_the_rank_is_that_of_the_tag_or_of_the_message(line: str, rank: int | None) -> None:
    (found,) = find(line)
    assert found.rank == rank


def test_a_traceback_is_read_for_what_ran_out_and_up_to_its_beginning() -> None:
    frames = [f'  File "f{number}.py", line {number}, in f' for number in range(401)]
    (failed,) = find("\n".join([*frames, "CUDA error: out of memory"]))
    assert [line for _, _, line in failed.frames] == list(range(400, 0, -1))
    (report,) = find("\n".join([*frames, "CUDA driver error: invalid argument"]))
    assert report.frames == ()


def test_two_reports_of_one_failure_are_one_unless_they_contradict_each_other() -> None:
    bare, asked = "failed to allocate buffer of size {}", "failed to allocate {} bytes on device 1"
    size = 1 << 30
    line = "killed by signal: Killed."
    both = "dataloader-killed"
    # The second may have what the first has not.
    assert told(f"DataLoader worker is {line}", f"DataLoader worker (pid 7) is {line}") == [
        (both, {}, {"pid": 7})
    ]
    assert told(f"DataLoader worker (pid 7) is {line}", f"DataLoader worker (pid 8) is {line}") == [
        (both, {}, {"pid": 7}),
        (both, {}, {"pid": 8}),
    ]
    # One layer prints the size less exactly than the next.
    assert told(bare.format(size), asked.format(size + 8192)) == [("allocation", {"requested": size}, {})]
    assert [fields["requested"] for _, fields, _ in told(bare.format(size), asked.format(size + 8193))] == [
        size,
        size + 8193,
    ]


def test_consequences_of_one_kind_are_one_and_a_mention_gives_way_to_a_failure_alone() -> None:
    lost, ended = "Connection reset by peer", "srun: Job step aborted"

    def families(*lines: str) -> list[tuple[str, str]]:
        return [(each.message.family, each.message.form) for each in find("\n".join(lines))]

    assert families(lost, lost) == [("aftermath", "peer lost")]
    assert families(lost, ended) == [("aftermath", "peer lost"), ("aftermath", "ended by the launcher")]
    mentioned, report = "gizmo: out of memory", "MA 1.00 GB Max_MA 2.00 GB CA 3.00 GB Max_CA 4 GB"
    assert families(report, mentioned) == [("deepspeed-mem", ""), ("mention", "")]
    assert families(mentioned, "CUDA error: out of memory") == [("cuda-runtime", "")]
