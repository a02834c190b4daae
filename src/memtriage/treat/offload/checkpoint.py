"""Save and load `state_dict` in the layout of `torch.optim.AdamW`; nothing is in memory twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor

from memtriage.treat.offload.exchange import Exchange
from memtriage.treat.offload.pipeline import Lane, TileSlot
from memtriage.treat.offload.resident import ResidentParameter
from memtriage.treat.offload.tiles import pack

PARTITION: Final = "partition"
"""Key of a partitioned `state_dict`: the rank and the number of ranks that its tensors belong to."""

KEPT_SETTINGS: Final = (
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "amsgrad",
    "decoupled_weight_decay",
)
"""Group settings of AdamW that choose an implementation: the loading optimizer keeps its own."""


def matched_groups(
    groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[Any, Tensor]]:
    """The groups with the saved settings, and the parameters by the ids they were saved under.

    Raises:
        ValueError: the saved groups have other sizes or were made with amsgrad.
    """
    ours, theirs = (
        [len(own_group["params"]) for own_group in groups],
        [len(saved_group["params"]) for saved_group in saved],
    )
    if ours != theirs:
        raise ValueError(f"the loaded state has groups of {theirs} parameters, this optimizer of {ours}")
    if any(saved_group.get("amsgrad") for saved_group in saved):
        raise ValueError("the loaded state was made with amsgrad=True, which OffloadedAdamW lacks")
    merged = []
    for group, saved_group in zip(groups, saved, strict=True):
        keep = {key: group[key] for key in ("params", *KEPT_SETTINGS) if key in group}
        settings = deepcopy({key: value for key, value in saved_group.items() if key != "params"})
        merged.append(group | settings | keep)
    ids = chain.from_iterable(saved_group["params"] for saved_group in saved)
    parameters = chain.from_iterable(own_group["params"] for own_group in groups)
    return merged, dict(zip(ids, parameters, strict=True))


def check_partition(state_dict: Mapping[str, Any], exchange: Exchange | None) -> bool:
    """Whether the tensors are a rank's share. Raises ValueError if it is another rank's."""
    saved = state_dict.get(PARTITION)
    if saved is None:
        return False
    ours = {"rank": 0, "ranks": 1} if exchange is None else {"rank": exchange.rank, "ranks": exchange.ranks}
    if dict(saved) != ours:
        raise ValueError(
            f"the loaded state is the share of {dict(saved)}, this optimizer's is {ours}; "
            "use full_state_dict() to change the number of ranks"
        )
    return ours["ranks"] > 1  # one rank's share is the whole


def gathered_entry(
    resident: ResidentParameter, exchange: Exchange, lane: Lane, slot: TileSlot, tile: int, *, keep: bool
) -> dict[str, Tensor]:
    """A partitioned parameter's whole state on the host, for ranks with `keep`. All ranks must call it.

    Args:
        lane: to the parameter's device, through which the shares travel.
        slot: one of the ring's, not in use.
        keep: whether this rank wants the result; else it is empty.
    """
    entry: dict[str, Tensor] = {"step": resident.step.clone()} if keep else {}
    for key, share in resident.publish().items():
        if key == "step":
            continue
        whole = torch.empty_strided(resident.shape, resident.strides, dtype=share.dtype) if keep else None
        _gather(resident, share, whole, exchange, lane, slot, tile)
        if whole is not None:
            entry[key] = whole
    return entry


def _gather(
    resident: ResidentParameter,
    share: Tensor,
    whole: Tensor | None,
    exchange: Exchange,
    lane: Lane,
    slot: TileSlot,
    tile: int,
) -> None:
    flat = None if whole is None else whole.as_strided((whole.numel(),), (1,))
    for pieces in pack([resident.share.chunk], tile):
        piece = pieces[0]
        mine = exchange.room_to_send(lane, share.dtype)[: piece.end]
        own = share[piece.start : piece.stop]
        slot.vacated()
        up = slot.up(share.dtype)[: own.numel()]
        up.copy_(own)
        slot.send(lane, [mine[: own.numel()]], [up])
        for rank, row in enumerate(exchange.gather(lane, mine)):
            first, last = resident.share.span(piece.start, piece.stop, rank)
            if flat is not None:
                with lane.up():
                    flat[first:last].copy_(row[: last - first])
