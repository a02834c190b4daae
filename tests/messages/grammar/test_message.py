"""A message's figures under one set of names, and the sums of those that there are."""

from __future__ import annotations

import pytest

from memtriage.messages.grammar.message import Message, OomFields, figures

MIB = 1024**2


@pytest.mark.parametrize(
    ("message", "ran_out"),
    [
        (Message("cuda-v2"), True),
        (Message("shm"), True),
        (Message("shm", form="gone"), False),
        (Message("engine", form="pool"), True),
        (Message("engine", form="report"), False),
        (Message("allocation", form="failed"), True),
        (Message("allocation", form="survived"), False),
        (Message("launcher", form="killed"), False),
        (Message("mention"), False),
    ],
)
def test_some_families_and_forms_do_not_mean_that_memory_ran_out(message: Message, ran_out: bool) -> None:
    assert message.ran_out == ran_out


def test_a_number_is_a_size_and_no_list() -> None:
    message = Message("cuda-v2", fields={"total": 8, "free": None, "processes": [{"pid": 1, "in_use": 2}]})
    assert [message.number(name) for name in ("total", "free", "processes", "allowed")] == [
        8,
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Message("cuda-v2"), OomFields()),
        (
            Message(
                "cuda-v2",
                fields={
                    "requested": 1,
                    "total": 100,
                    "free": 2,
                    "allocated": 30,
                    "reserved_unallocated": 4,
                    "private_pools": 5,
                    "allowed": 60,
                    "max_allowed": 61,
                    "this_process": 70,
                },
                device="cuda:3",
            ),
            OomFields("cuda:3", 1, 100, 2, 30, 4, 5, 60),
        ),
        # Releases from 1.4 on print what is reserved with the allocated bytes in it, older ones without them.
        (
            Message("cuda-v1", fields={"allocated": 30, "reserved": 34}),
            OomFields(allocated=30, reserved_unallocated=4),
        ),
        (
            Message("cuda-v1", fields={"allocated": 30, "reserved": 29}),
            OomFields(allocated=30, reserved_unallocated=0),
        ),
        (Message("cuda-v1", fields={"reserved": 34}), OomFields()),
        (
            Message("cuda-v1", fields={"allocated": 30, "cached": 4, "reserved": 40}),
            OomFields(allocated=30, reserved_unallocated=4),
        ),
        # Metal has another name for its cap.
        (Message("mps", fields={"max_allowed": 61}), OomFields(allowed=61)),
    ],
)
def test_the_figures_of_any_release_have_one_set_of_names(message: Message, expected: OomFields) -> None:
    assert figures(message) == expected


@pytest.mark.parametrize(
    ("fields", "reserved", "outside"),
    [
        (OomFields(total=100, free=20, allocated=30, reserved_unallocated=10), 40, 40),
        (OomFields(total=100, free=60, allocated=30, reserved_unallocated=10), 40, 0),
        # A printed size is rounded: a little less than nothing is nothing, more is a contradiction.
        (OomFields(total=100, free=61, allocated=30, reserved_unallocated=10), 40, 0),
        (OomFields(total=0, free=0, allocated=64 * MIB - 1, reserved_unallocated=0), 64 * MIB - 1, 0),
        (OomFields(total=0, free=0, allocated=64 * MIB, reserved_unallocated=0), 64 * MIB, None),
        (OomFields(free=20, allocated=30, reserved_unallocated=10), 40, None),
        (OomFields(total=100, allocated=30, reserved_unallocated=10), 40, None),
        (OomFields(total=100, free=20, reserved_unallocated=10), None, None),
        (OomFields(total=100, free=20, allocated=30), None, None),
    ],
)
def test_sums_exist_only_where_their_parts_do(
    fields: OomFields, reserved: int | None, outside: int | None
) -> None:
    assert (fields.reserved, fields.outside) == (reserved, outside)
