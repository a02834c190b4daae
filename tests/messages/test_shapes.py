"""The size of a failing request as a product of sizes that the program knows."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.messages.errors import read_message
from memtriage.messages.shapes import as_logits, factor, kind_of, with_shifted
from support.message_texts import ERRORS

MIB = 1024**2


def factored(nbytes: int, shapes: dict[str, int], itemsizes: Sequence[int] = (4, 2)) -> str | None:
    product = factor(nbytes, shapes, itemsizes)
    return None if product is None else product.text


def test_the_logits_of_a_real_report() -> None:
    asked = read_message(ERRORS["in_container"]).requested
    assert asked is not None
    shapes = {"hidden": 4096, "tokens": 30688, "vocabulary": 151936}
    assert factored(asked, shapes) == "17.37 GiB = 30,688 x 151,936 x 4 bytes (tokens x vocabulary)"


SIZES = st.dictionaries(
    st.sampled_from(["batch", "sequence", "heads", "hidden"]), st.integers(2, 5000), min_size=1
)


@settings(deadline=None)
@given(SIZES, st.sampled_from([1, 2, 4, 8]))
def test_an_exact_product_is_always_found(shapes: dict[str, int], itemsize: int) -> None:
    nbytes = itemsize
    for count in shapes.values():
        nbytes *= count
    found = factored(nbytes, shapes, [itemsize])
    if nbytes in (2 * MIB, 20 * MIB):
        assert found is None
        return
    assert found is not None
    assert product_of(found) == nbytes


def product_of(text: str) -> int:
    product = 1
    for number in re.split(r" x ", text.partition(" = ")[2].partition(" byte")[0]):
        product *= int(number.replace(",", ""))
    return product


@pytest.mark.parametrize(
    ("request_size", "found"),
    [
        pytest.param(24 * MIB, "24.00 MiB = 3,000 x 2,000 x 4 bytes (a x b)", id="rounded-to-2MiB"),
        pytest.param(26 * MIB, None, id="another-size"),
        pytest.param(20 * MIB, None, id="20MiB-says-nothing"),
        pytest.param(24_000_001, None, id="exact-size-of-something-else"),
    ],
)
def test_rounding_by_the_allocator(request_size: int, found: str | None) -> None:
    assert factored(request_size, {"a": 3000, "b": 2000}, [4]) == found


def test_scores_of_attention_use_the_length_twice() -> None:
    shapes = {"batch": 8, "heads": 16, "sequence": 4096}
    assert factored(8 * 16 * 4096 * 4096 * 4, shapes) == (
        "8.00 GiB = 8 x 16 x 4,096 x 4,096 x 4 bytes (batch x heads x sequence x sequence)"
    )


@pytest.mark.parametrize(
    ("shapes", "itemsize", "meaning"),
    [
        ({"tokens": 4096, "vocab": 151936}, 4, "fp32 logits"),
        ({"tokens": 4096, "vocab": 151936}, 2, "16-bit logits"),
        ({"b": 4, "heads": 16, "s": 4096}, 2, "16-bit attention scores"),
        ({"vocab": 151936, "hidden": 8192}, 2, "16-bit embedding or output weights"),
        ({"batch": 33, "seq": 4001, "hidden": 8209}, 2, "16-bit hidden states"),
        ({"seq": 4001, "hidden": 8209}, 4, "fp32 hidden states"),
        ({"rows": 123457, "columns": 4099}, 4, None),
    ],
)
def test_what_such_a_tensor_is(shapes: dict[str, int], itemsize: int, meaning: str | None) -> None:
    nbytes = itemsize
    for name, count in shapes.items():
        nbytes *= count ** (2 if name == "s" else 1)
    found = factor(nbytes, shapes)
    assert found is not None
    assert (found.itemsize, found.meaning) == (itemsize, meaning)


def test_a_sequence_is_also_tried_without_its_last_position() -> None:
    shapes = {"batch": 8, "seq": 4096, "context": 7}
    assert with_shifted(shapes) == {**shapes, "(seq - 1)": 4095, "(context - 1)": 6}
    assert [kind_of(name) for name in ("(seq - 1)", "Vocab_Size", "d_model", "mbs", "heads")] == [
        "sequence",
        "vocabulary",
        "hidden",
        "batch",
        "heads",
    ]


@pytest.mark.parametrize("segment", [2, 20])
def test_a_request_for_a_whole_segment_is_no_tensor_of_that_size(segment: int) -> None:
    assert factor(segment * MIB, {"a": segment * MIB // 4}, [4]) is None
    one_less = factor(segment * MIB - 4, {"a": segment * MIB // 4 - 1}, [4])
    assert one_less is not None and one_less.names == ("a",)


def test_elements_of_one_byte() -> None:
    assert factored(33 * 35, {"a": 33, "b": 35}, [1]) == "1.13 KiB = 33 x 35 x 1 byte (a x b)"


def test_logits_of_an_unknown_number_of_tokens() -> None:
    told = as_logits(18650895483, {"batch": 8, "vocab": 151936})
    assert told == (
        "17.37 GiB would be 30,688 x 151,936 x 4 bytes: fp32 logits of 30,688 tokens (batch 8 x 3,836)"
    )
    assert as_logits(18650895483, {"batch": 8}) is None
    assert as_logits(20 * MIB, {"vocab": 1024}) is None, "a rounded request has no shape"
    assert as_logits(64 * MIB, {"vocab": 151_936_000}) is None


@pytest.mark.parametrize(
    ("rows", "request_size", "known"),
    [
        pytest.param(1344, 12 * MIB, True, id="10.5 MiB are rounded up"),
        pytest.param(1280, 10 * MIB, True, id="10 MiB are asked for as they are"),
        pytest.param(1216, 10 * MIB, False, id="9.5 MiB come from a segment of 20 MiB"),
        pytest.param(1344, 14 * MIB, False, id="not to the next step but one"),
    ],
)
def test_large_requests_are_rounded_up_to_2_mib(rows: int, request_size: int, known: bool) -> None:
    assert (factored(request_size, {"a": rows, "b": 2048}) is not None) == known


@pytest.mark.parametrize(
    ("nbytes", "shapes", "found"),
    [
        pytest.param(4, {"batch": 1}, False, id="a size of one says nothing"),
        pytest.param(101**2 * 4, {"a": 101}, True, id="a size used twice"),
        pytest.param(101**3 * 4, {"a": 101}, False, id="a size used three times"),
        pytest.param(101 * 103 * 107 * 109 * 4, dict.fromkeys("abcd", 0), False, id="unknown sizes"),
        pytest.param(101 * 103 * 107 * 109 * 4, dict(zip("abcd", (101, 103, 107, 109), strict=True)), True,
                     id="four sizes"),
        pytest.param(11 * 13 * 17 * 19 * 23 * 4, dict(zip("abcde", (11, 13, 17, 19, 23), strict=True)), False,
                     id="five sizes"),
    ],
)  # fmt: skip
def test_a_product_has_at_most_four_sizes(nbytes: int, shapes: dict[str, int], found: bool) -> None:
    assert (factor(nbytes, shapes, [4]) is not None) == found


@pytest.mark.parametrize(
    ("nbytes", "vocabulary", "tokens"),
    [
        pytest.param(24 * MIB, 2 * MIB, 3, id="a whole number of tokens"),
        pytest.param(26 * MIB, 2 * MIB, 3, id="rounded up by 2 MiB"),
        pytest.param(26 * MIB + 1, 2 * MIB, None, id="by more than the allocator rounds"),
        pytest.param(24 * MIB, 3_145_853, None, id="tokens that need more than was asked for"),
        pytest.param(25_166_001, 3_145_853, None, id="an exact request is not rounded by printing"),
        pytest.param(32 * MIB, 8 * MIB, None, id="a single token is no batch"),
    ],
)
def test_tokens_fit_within_the_rounding_of_a_request(
    nbytes: int, vocabulary: int, tokens: int | None
) -> None:
    told = as_logits(nbytes, {"vocab": vocabulary})
    assert (told is not None) == (tokens is not None)
    if told is not None:
        assert told.endswith(f"{tokens} x {vocabulary:,} x 4 bytes: fp32 logits of {tokens} tokens")
