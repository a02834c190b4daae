"""How a program's routers choose among experts, where that was recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from memtriage.model.units import count
from memtriage.prediction.build import BuildError

_EXPECTED = (
    "expected JSON: for each router, in the order in which they run, how many tokens or which share of them "
    "each of its experts gets, such as [[50, 30, 20], [10, 60, 30]], or one such list for all routers"
)


class Routing:
    """Which share of a router's choices each of its experts gets.

    Routers are those that choose by `torch.topk`, in the order in which they do in a forward pass. A
    checkpointed one that chooses again has the random state of the first time.

    Args:
        source: what the shares were read from.
        counts: of each router and expert; one list is for all routers.

    Attributes:
        passes: another number in each forward pass.
    """

    def __init__(self, source: str, counts: Sequence[Sequence[float]]) -> None:
        self.passes: Callable[[], int] = lambda: 0
        self._source = source
        self._shares = [torch.tensor(each, dtype=torch.float64) / sum(each) for each in counts]
        self._place_at: dict[bytes, int] = {}  # of a router, by random state
        self._pass = -1
        self._next = 0  # router of the pass
        self._rows = 0  # for which routers have chosen, from the first one on
        self._most = 0  # routers in a pass
        self._others: set[int] = set()  # numbers of candidates of other choices

    def chances(self, scores: torch.Tensor, chosen: int, state: torch.Tensor) -> torch.Tensor | None:
        """How likely each expert is among those that the next router chooses for a token.

        None if no such router was recorded.

        Args:
            scores: of each expert; tokens are rows.
            state: of what draws.

        Raises:
            BuildError: no router that chooses so many can have these shares.
        """
        if self._pass != self.passes():
            self._pass, self._next = self.passes(), 0
        key, experts, known = state.numpy().tobytes(), scores.shape[-1], len(self._shares)
        rows = scores.numel() // experts
        place = self._place_at.get(key, self._next)
        recorded = self._shares[place % known]
        # A loss that balances experts chooses again for all routers at once.
        balances = known > 1 and place > 0 and place % known == 0 and rows == self._rows
        if len(recorded) != experts or balances:
            self._others.add(experts)
            return None
        if key not in self._place_at:
            self._place_at[key] = place
            self._next += 1
            self._rows = rows + (self._rows if place % known else 0)
            self._most = max(self._most, self._next)
        chances = recorded * chosen
        if round(float(chances.max()), 6) > 1:
            raise BuildError(
                f"--routing {self._source}: router {place % known + 1} chooses {chosen} experts per token, "
                f"so none is more than {1 / chosen:.2%} of its choices, but one has {recorded.max():.2%}; "
                "count every expert that it chooses, not the first alone"
            )
        return chances

    def check(self) -> None:
        """Check that the program, which has run, has the routers that were recorded.

        Raises:
            BuildError: it does not.
        """
        known = len(self._shares)
        if self._most < known:
            experts = count(len(self._shares[self._most]), "expert")
            reason = f"router {self._most + 1} of {known} has {experts}, but the program has no such router: "
            reason += self._left()
        elif self._most % known:
            reason = f"it has {known} routers, but the program has {self._most}"
        else:
            return
        raise BuildError(
            f"--routing {self._source}: {reason}; give one list per router, in the order in which they run, "
            "or one for all"
        )

    def text(self) -> str:
        """What was taken of routers."""
        again = f" ({self._most} in a forward pass)" if self._most > len(self._shares) > 1 else ""
        left = f", and {self._left()}, each equally often" if self._others else ""
        return f"a router is taken to choose each expert as often as in {self._source}{again}{left}"

    def _left(self) -> str:
        others = ", ".join(map(str, sorted(self._others)))
        return (
            f"other choices by torch.topk are among {others}"
            if others
            else "there is no other choice by torch.topk"
        )


def read_routing(file: Path) -> Routing:
    """Read what `Routing` takes.

    Raises:
        ValueError: the file cannot be read, or has something else.
    """
    try:
        read = msgspec.json.decode(file.read_bytes())
        nested = isinstance(read, list) and any(isinstance(each, list) for each in read)
        counts = msgspec.convert(read if nested else [read], list[list[Annotated[float, msgspec.Meta(ge=0)]]])
        for number, each in enumerate(counts, 1):
            if not 0 < sum(each) < math.inf:
                raise ValueError(f"router {number} sends no token to any expert")
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"--routing {file}: {error}; {_EXPECTED}") from error
    return Routing(str(file), counts)
