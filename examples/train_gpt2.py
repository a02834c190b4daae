"""Trains a small GPT-2 on made-up text, with a memory leak that can be switched off.

    memtriage run examples/train_gpt2.py              # leaks: what holds the memory, and where to detach
    memtriage run examples/train_gpt2.py --no-leak    # clean

The leak is one that shipped in a real trainer (https://github.com/ServiceNow/Fast-LLM/pull/486). The language
model's head computes loss and gradient by hand, inside a custom autograd function, and logs its loss as it
goes. There the loss has no graph yet. But `Function.apply` puts its `grad_fn` on the very tensor that
`forward` returned, which by then is in the log: from there on every logged scalar keeps the head's context,
and with it the stage's input and the logits of its micro-batch, until the log is thrown away.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup


@dataclass
class TrainingContext:
    """What the parts of a step hand to each other: the batch's labels in, losses for the log out."""

    detach_losses: bool
    labels: torch.Tensor | None = None
    losses: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))

    def mean_loss(self, name: str, last: int) -> float:
        """Mean of the latest `last` values."""
        return sum(value.item() for value in self.losses[name][-last:]) / last


class LanguageModelHead:
    """Projection to the vocabulary and cross-entropy, with a backward that is written out by hand."""

    def forward(
        self, stage_input: torch.Tensor, weight: torch.Tensor, context: TrainingContext
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the loss of next-token prediction and what backward needs."""
        logits = F.linear(stage_input[:, :-1], weight)
        assert context.labels is not None
        loss = F.cross_entropy(logits.flatten(0, 1), context.labels[:, 1:].flatten())
        context.losses["lm_loss"].append(loss.detach() if context.detach_losses else loss)
        return loss, [stage_input, logits]

    def backward(
        self, grad_loss: torch.Tensor, kept: list[torch.Tensor], weight: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradients of the stage's input and of the weight."""
        stage_input, logits = kept
        targets = labels[:, 1:].unsqueeze(-1)
        grad_logits = logits.softmax(-1)
        grad_logits.scatter_add_(-1, targets, torch.full_like(targets, -1.0, dtype=logits.dtype))
        grad_logits *= grad_loss / targets.numel()
        grad_input = torch.zeros_like(stage_input)
        grad_input[:, :-1] = grad_logits @ weight
        grad_weight = grad_logits.flatten(0, 1).T @ stage_input[:, :-1].flatten(0, 1)
        return grad_input, grad_weight


class WrapForwardBackward(torch.autograd.Function):
    """Puts a hand-written forward and backward into the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        stage_input: torch.Tensor,
        weight: torch.Tensor,
        head: LanguageModelHead,
        context: TrainingContext,
    ) -> torch.Tensor:
        loss, ctx.context = head.forward(stage_input, weight, context)
        ctx.head, ctx.labels = head, context.labels
        ctx.save_for_backward(weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        grad_input, grad_weight = ctx.head.backward(grad_loss, ctx.context, weight, ctx.labels)
        return grad_input, grad_weight, None, None


class Stage(torch.nn.Module):
    """The model and its head; a forward returns the loss of a micro-batch."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(config)
        self.head = LanguageModelHead()

    def forward(self, tokens: torch.Tensor, context: TrainingContext) -> torch.Tensor:
        context.labels = tokens
        hidden = self.model.transformer(tokens, use_cache=False).last_hidden_state
        return WrapForwardBackward.apply(hidden, self.model.lm_head.weight, self.head, context)


def made_up_text(sequences: int, length: int, vocabulary: int) -> torch.Tensor:
    """Tokens in which each follows from the one before, but for one in ten: something to learn."""
    tokens = torch.randint(vocabulary, (sequences, length))
    follows = torch.rand(sequences, length) > 0.1
    for at in range(1, length):
        tokens[:, at] = torch.where(follows[:, at], (tokens[:, at - 1] * 5 + 7) % 64, tokens[:, at])
    return tokens


def endless(loader: DataLoader[tuple[torch.Tensor, ...]]) -> Iterator[torch.Tensor]:
    while True:
        for (tokens,) in loader:
            yield tokens


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = GPT2Config(
        vocab_size=args.vocabulary,
        n_positions=args.sequence,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=args.width // 64,
        bos_token_id=None,
        eos_token_id=None,
    )
    stage = Stage(config).to(device).train()
    optimizer = torch.optim.AdamW(stage.parameters(), lr=args.learning_rate, weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=args.steps)
    loader = DataLoader(
        TensorDataset(made_up_text(512, args.sequence, args.vocabulary)),
        batch_size=args.batch,
        shuffle=True,
    )
    batches = endless(loader)
    context = TrainingContext(detach_losses=not args.leak)

    for step in range(1, args.steps + 1):
        for _ in range(args.accumulation):
            loss = stage(next(batches).to(device), context)
            (loss / args.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        mean = context.mean_loss("lm_loss", last=args.accumulation)
        print(f"step {step:3d}  loss {mean:.4f}  lr {scheduler.get_last_lr()[0]:.2e}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 on made-up text.")
    parser.add_argument(
        "--leak",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="log the loss without detaching it",
    )
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2, help="sequences in a micro-batch")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--sequence", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())
