"""Refit: the trainer's weights go to the generation engine in two buckets that take turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from engine import Generation, Piece

_ALIGNMENT = 512
"""Bytes; as the caching allocator aligns tensors, so that a view of any type is allowed at each start."""


def pieces_of(weights: Iterable[tuple[str, Tensor]]) -> list[Piece]:
    """All weights, each at the start of a bucket of its own."""
    return [Piece(name, 0, weight.shape, weight.dtype) for name, weight in weights]


def pack(pieces: Iterable[Piece], room: int) -> Iterator[list[Piece]]:
    """Fill buckets in order.

    Args:
        pieces: what to pack; their `start` is not looked at.
        room: bytes of a bucket.

    Raises:
        ValueError: a weight is larger than a bucket.
    """
    bucket: list[Piece] = []
    start = 0
    for piece in pieces:
        if piece.nbytes > room:
            raise ValueError(f"{piece.name} takes {piece.nbytes} bytes; a bucket has {room}: make it larger")
        if start + piece.nbytes > room:
            yield bucket
            bucket, start = [], 0
        bucket.append(Piece(piece.name, start, piece.shape, piece.dtype))
        start += -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
    if bucket:
        yield bucket


def stream(weights: dict[str, Tensor], engine: Generation, room: int) -> int:
    """Send all weights; returns the number of buckets.

    Two buckets of `room` bytes are on the GPU meanwhile. One is filled while the engine copies the other,
    and each is handed over by an IPC handle of its own, as NeMo-RL's `stream_weights_via_ipc_zmq` does.
    """
    device = next(iter(weights.values())).device
    buckets = [torch.empty(room, dtype=torch.uint8, device=device) for _ in range(2)]
    sent = 0
    for pieces in pack(pieces_of(weights.items()), room):
        if sent >= len(buckets):
            engine.acknowledged()
        bucket = buckets[sent % len(buckets)]
        for piece in pieces:
            target = bucket[piece.start : piece.start + piece.nbytes].view(piece.dtype).view(piece.shape)
            target.copy_(weights[piece.name].detach())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        engine.send(bucket, pieces)
        sent += 1
    for _ in range(min(sent, len(buckets))):
        engine.acknowledged()
    del bucket, buckets
    if device.type == "cuda":
        # What the engine has released is freed only when asked for.
        torch.cuda.ipc_collect()
    return sent
