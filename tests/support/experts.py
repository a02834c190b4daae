"""Small mixtures of experts, whose routers send tokens in the ways that programs have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 32
EXPERTS = 4
CHOSEN = 2
RECORDED = [[5, 3, 2, 1], [0, 0.4, 0.3, 0.3]]
"""Of two routers, what each expert got: tokens, or their share."""


class Experts(nn.Module):
    """Experts, each of which gets the tokens that chose it; a way of sending them is a method."""

    def __init__(self, way: str, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))
            for _ in range(EXPERTS)
        )
        self._send = getattr(self, way)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._send(tokens, *self.router(tokens).softmax(-1).topk(CHOSEN, -1))

    def where(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """One expert after the other looks for its tokens."""
        result = torch.zeros_like(tokens)
        masks = nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for mask, expert in zip(masks, self.experts, strict=True):
            place, token = torch.where(mask)
            result.index_add_(0, token, expert(tokens[token]) * weights[token, place, None])
        return result

    def split(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Tokens are sorted by expert, and split by how many each gets."""
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        return self._sorted(tokens, weights, chosen, lambda ordered: ordered.split(counts))

    def ends(self, tokens: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Tokens are sorted by expert, and cut where the host finds their ends."""
        ends = torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0).cpu().numpy()
        return self._sorted(
            tokens,
            weights,
            chosen,
            lambda ordered: [ordered[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)],
        )

    def _sorted(
        self,
        tokens: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        cut: Callable[[torch.Tensor], Any],
    ) -> torch.Tensor:
        order = chosen.flatten().argsort()
        parts = cut(tokens[order // CHOSEN])
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(tokens).index_add_(0, order // CHOSEN, made * weights.flatten()[order, None])


WAYS = ("where", "split", "ends")


def mixture(
    way: str = "where",
    tokens: int = 512,
    hidden: int = 256,
    layers: int = 2,
    again: bool = False,
    before_layers: Callable[[], Any] = lambda: None,
) -> Callable[[Any], Any]:
    """A build function of layers of experts.

    Args:
        again: whether layers are computed again in backward.
        before_layers: is called in each step when the input is drawn.
    """

    def build(device: Any) -> Any:
        model = nn.ModuleList(Experts(way, hidden) for _ in range(layers)).to(device)
        optimizer = torch.optim.SGD(model.parameters())

        def step() -> None:
            states = torch.randn(tokens, WIDTH, device=device)
            before_layers()
            for layer in model:
                states = states + (checkpoint(layer, states, use_reentrant=False) if again else layer(states))
            states.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return build
