"""The size of a failing request as a product of sizes that the program knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import combinations_with_replacement
from math import prod
from typing import Final

from memtriage.messages.grammar.message import as_printed, printed_unit
from memtriage.model.units import MIB


@dataclass(frozen=True, slots=True)
class Product:
    """A request as a product.

    Attributes:
        text: the equation.
        names: the sizes in it, one repeated where it is used twice.
        itemsize: bytes of an element.
    """

    text: str
    names: tuple[str, ...]
    itemsize: int

    @property
    def is_logits(self) -> bool:
        """One value for each entry of the vocabulary and each token."""
        kinds = [kind_of(name) for name in self.names]
        return "vocabulary" in kinds and "hidden" not in kinds

    @property
    def is_scores(self) -> bool:
        """One value for each pair of positions, as attention that materializes its scores has."""
        kinds = [kind_of(name) for name in self.names]
        return kinds.count("sequence") == 2 and "vocabulary" not in kinds

    @property
    def meaning(self) -> str | None:
        """What such a tensor is, in words; None where the sizes do not say."""
        precision = {4: "fp32", 2: "16-bit"}.get(self.itemsize, f"{self.itemsize}-byte")
        kinds = {kind_of(name) for name in self.names}
        if self.is_logits:
            return f"{precision} logits"
        if self.is_scores:
            return f"{precision} attention scores"
        if kinds == {"vocabulary", "hidden"}:
            return f"{precision} embedding or output weights"
        if kinds >= {"sequence", "hidden"}:
            return f"{precision} hidden states"
        return None


_KINDS: Final[Mapping[str, frozenset[str]]] = {
    "vocabulary": frozenset({"v", "vocab", "vocabulary", "vocab_size"}),
    "sequence": frozenset({"s", "t", "l", "seq", "sequence", "seq_len", "length", "seqlen", "context"}),
    "hidden": frozenset({"h", "d", "hidden", "hidden_size", "d_model", "dim", "width"}),
    "batch": frozenset({"b", "n", "batch", "batch_size", "micro_batch", "mbs"}),
}
_SHIFTED: Final = " - 1"


def kind_of(name: str) -> str:
    """`batch`, `sequence`, `vocabulary` or `hidden` where a name means one of these; else the name."""
    plain = name.strip("()").removesuffix(_SHIFTED).lower()
    return next((kind for kind, names in _KINDS.items() if plain in names), plain)


def with_shifted(shapes: Mapping[str, int]) -> dict[str, int]:
    """The sizes, each sequence also without its last position: next-token logits are one shorter."""
    sizes: dict[str, int] = {}
    for name, count in shapes.items():
        sizes[name] = count
        if kind_of(name) == "sequence":
            sizes[f"({name}{_SHIFTED})"] = count - 1
    return sizes


def factor(nbytes: int, shapes: Mapping[str, int], itemsizes: Sequence[int] = (4, 2)) -> Product | None:
    """Find a product of known sizes, each used at most twice, that makes a request; None where none fits.

    A request in whole MiB, or one printed with two decimals, also matches a tensor that the allocator rounded
    up to it. Requests of up to 20 MiB that are rounded so carry no shape.

    Args:
        nbytes: what was asked.
        shapes: sizes by name (batch, sequence, vocabulary, hidden, heads, ...); sizes below 2 say nothing.
        itemsizes: bytes of an element to try, the likeliest first. The fewer, the fewer chance matches
            among powers of two.

    >>> factor(18650895483, {"tokens": 30688, "vocabulary": 151936}).text
    '17.37 GiB = 30,688 x 151,936 x 4 bytes (tokens x vocabulary)'
    """
    known = [(name, count) for name, count in shapes.items() if count > 1]
    for length in range(1, _MOST_FACTORS + 1):
        for names in combinations_with_replacement(known, length):
            if any(names.count(name) > 2 for name in names):
                continue
            for itemsize in itemsizes:
                if _makes(prod(count for _, count in names) * itemsize, nbytes):
                    factors = " x ".join(f"{count:,}" for _, count in names)
                    meaning = " x ".join(name for name, _ in names)
                    unit = "byte" if itemsize == 1 else "bytes"
                    text = f"{as_printed(nbytes)} = {factors} x {itemsize} {unit} ({meaning})"
                    return Product(text, tuple(name for name, _ in names), itemsize)
    return None


def as_logits(nbytes: int, shapes: Mapping[str, int]) -> str | None:
    """What a request would be as fp32 logits, where only the vocabulary is known, not the number of tokens.

    The number of tokens is the nearest that fits within the rounding of a printed size, a multiple of the
    batch if one fits. None without a vocabulary, or where no whole number of tokens fits.

    >>> as_logits(18650895483, {"batch": 8, "vocab": 151936})
    '17.37 GiB would be 30,688 x 151,936 x 4 bytes: fp32 logits of 30,688 tokens (batch 8 x 3,836)'
    """
    kinds = {kind_of(name): count for name, count in shapes.items()}
    vocabulary, batch = kinds.get("vocabulary", 0), kinds.get("batch", 1)
    if vocabulary < 2 or nbytes <= 2 * _LARGE_REQUEST:
        return None
    row, error = vocabulary * _FP32, _print_error(nbytes)
    for multiple in dict.fromkeys((max(1, batch), 1)):
        tokens = round(nbytes / (row * multiple)) * multiple
        if tokens > 1 and -_ROUNDING - error <= tokens * row - nbytes <= error:
            each = f" (batch {batch:,} x {tokens // batch:,})" if multiple > 1 else ""
            equation = f"{tokens:,} x {vocabulary:,} x {_FP32} bytes"
            return f"{as_printed(nbytes)} would be {equation}: fp32 logits of {tokens:,} tokens{each}"
    return None


_MOST_FACTORS: Final = 4
_FP32: Final = 4
_LARGE_REQUEST: Final = 10 * MIB
"""Above this the CUDA allocator rounds up to 2 MiB; below it asks for 2 or 20 MiB, whatever the tensor.
Source: kMinLargeAlloc and kRoundLarge in c10/core/AllocatorConfig.h."""
_SMALL_SEGMENTS: Final = (2 * MIB, 20 * MIB)
_ROUNDING: Final = 2 * MIB


def _makes(tensor: int, request: int) -> bool:
    """Whether a tensor of so many bytes makes a request of so many."""
    if tensor == request:
        return request not in _SMALL_SEGMENTS
    if tensor < _LARGE_REQUEST or tensor > request + _print_error(request):
        return False
    rounded = -(-tensor // _ROUNDING) * _ROUNDING
    return abs(rounded - request) <= _print_error(request)


def _print_error(request: int) -> int:
    """How far a request may be from the truth: half of the last printed digit, 0 for an exact figure."""
    unit = printed_unit(request)
    printed = int((Decimal(f"{request / unit:.2f}") * unit).to_integral_value())
    return unit // 200 if printed == request and request % MIB else 0
