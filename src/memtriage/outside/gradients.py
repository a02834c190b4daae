"""Gradients of a running process. They come and go at each step, so the copy of a heap has some of them.

Those of one instant are read alone, which takes less than a millisecond, and are put into the copy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from memtriage.outside.memory import Words
from memtriage.outside.tensors import LiveTensors, TorchReader
from memtriage.process.stdlib import time

_APART_S: Final = 0.004
"""Seconds between two looks, about: at random, so that they do not keep step with the program."""
_ENOUGH_S: Final = 0.5
"""Seconds without more gradients than before after which there are no more."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of some tensors at one instant.

    Attributes:
        there: which of the tensors have one.
        where: where these have it.
        tensors: the gradients.
    """

    there: npt.NDArray[np.bool_]
    where: Words
    tensors: LiveTensors

    @property
    def parts(self) -> list[tuple[Words, Words]]:
        """Addresses and the words at each, for a copy that is to contain them."""
        parts = [(self.where, self.tensors.parts[0][0][:, None]), *self.tensors.parts]
        return [(addresses[self.there], words[self.there]) for addresses, words in parts]


def gradients_now(torch: TorchReader, leaves: Words) -> Gradients:
    """Read the gradients that some tensors have right now."""
    where, tensors = torch.live_gradients(leaves)
    found = torch.live(tensors)
    still = torch.live_gradients(leaves)[1] == tensors  # else what was read may be something else by now
    return Gradients(still & (found.sizes > 0), where, found)


def most_gradients(
    torch: TorchReader, leaves: Words, is_late: Callable[[], bool]
) -> tuple[Gradients, npt.NDArray[np.bool_]]:
    """Read at several instants; return the gradients of the one with most, and which leaves ever had one."""
    found = gradients_now(torch, leaves)
    ever, since = found.there.copy(), time.monotonic()
    while not found.there.all() and time.monotonic() - since < _ENOUGH_S and not is_late():
        time.sleep(random.uniform(0, 2 * _APART_S))
        now = gradients_now(torch, leaves)
        ever |= now.there
        if now.there.sum() > found.there.sum():
            found, since = now, time.monotonic()
    return found, ever
