"""Kernels put into PyTorch's dispatcher for the time of a trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch


class Overrides:
    """A set of registrations that one call removes."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")

    def put(self, name: str, key: str, make: Callable[[Any], Callable[..., Any]]) -> Any:
        """Register `make(overload)` as the kernel of `aten::name` at a dispatch key.

        Returns the overload; None for an operator that this version of torch does not have.
        """
        packet_name, _, overload_name = name.partition(".")
        packet = getattr(torch.ops.aten, packet_name, None)
        overload = None if packet is None else getattr(packet, overload_name or "default", None)
        if overload is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Overriding a previously registered kernel": that is the point
            self._library.impl(name, make(overload), key)
        return overload

    def remove(self) -> None:
        """Restore every kernel."""
        self._library._destroy()
