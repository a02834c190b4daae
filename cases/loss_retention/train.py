"""Losses kept for the log keep every micro-batch's autograd context alive (Fast-LLM PR 486).

A depth-first schedule: each micro-batch runs forward through all stages, then backward through them, before
the next begins. The head is a fused forward and backward: it computes loss and gradients in one go, in
`Function.forward`, and hands the gradient out in `Function.backward`. `Function.apply` sets the `grad_fn` of
the very tensor that `forward` returned, so the loss that the head has put into the log meanwhile is
attached after all, and holds its context: the stage's input and the gradient of it.

    python train.py --micro-batches 128                        keeps everything until the end of the step
    python train.py --micro-batches 128 --detach --free-batch  flat
    memtriage run --per-microbatch train.py                    a line of memory for each micro-batch
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding


@dataclass(slots=True)
class Context:
    """What the schedule keeps of a step: tokens by micro-batch, and losses for the log."""

    batch: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    losses: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))


def wrap_forward_backward(
    forward: Callable[..., tuple[torch.Tensor, Any]], backward: Callable[[torch.Tensor, Any], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """A differentiable function of its first argument, from a pair that hands a context across."""

    class Wrap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, source: torch.Tensor, *rest: Any) -> torch.Tensor:
            output, ctx.context = forward(source, *rest)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            result = backward(gradients[0], ctx.context)
            return (result, *[None] * (len(ctx.needs_input_grad) - 1))

    return Wrap.apply


class Body(nn.Module):
    """The first stage: embedding and decoder layers."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = LlamaRotaryEmbedding(config)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        rotation = self.rotary(hidden, positions)
        for layer in self.layers:
            out = layer(hidden, position_ids=positions, position_embeddings=rotation)
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden


class Head(nn.Module):
    """The last stage: norm, projection and loss, forward and backward at once.

    Args:
        detach: log the loss without its graph. This is the fix.
    """

    detach: bool

    def __init__(self, config: LlamaConfig, *, detach: bool) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size)
        self.projection = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.detach = detach
        self._loss = wrap_forward_backward(self._forward_backward, self._backward)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor, context: Context) -> torch.Tensor:
        return self._loss(hidden, labels, context)

    def _forward_backward(
        self, hidden: torch.Tensor, labels: torch.Tensor, context: Context
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        with torch.enable_grad():
            source = hidden.detach().requires_grad_()
            logits = self.projection(self.norm(source))
            total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            weights = list(self.parameters())
            gradient, *of_weights = torch.autograd.grad(total, [source, *weights])
        for weight, more in zip(weights, of_weights, strict=True):
            weight.grad = more if weight.grad is None else weight.grad.add_(more)
        loss = total.detach()
        context.losses["lm_loss"].append(loss.detach() if self.detach else loss)
        return loss, (hidden, gradient)

    @staticmethod
    def _backward(gradient: torch.Tensor, context: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return context[1] * gradient


class Schedule:
    """Runs the micro-batches of a step, depth first.

    Args:
        free_batch: drop a micro-batch's tokens after its last forward stage.
    """

    def __init__(self, body: Body, head: Head, optimizer: torch.optim.Optimizer, *, free_batch: bool) -> None:
        self._body, self.head, self._optimizer = body, head, optimizer
        self.free_batch = free_batch

    def run_step(self, micro_batches: int, draw: Callable[[], torch.Tensor]) -> float:
        """One optimizer step; the mean of the losses that were logged."""
        context = Context()
        for number in range(micro_batches):
            tokens = draw()
            context.batch[number] = {
                "inputs": tokens[:, :-1].contiguous(),
                "labels": tokens[:, 1:].contiguous(),
            }
            self._run_micro_batch(number, context)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(torch.stack(context.losses["lm_loss"]).detach().mean())

    def _run_micro_batch(self, number: int, context: Context) -> None:
        batch = context.batch[number]
        hidden = self._body(batch["inputs"])
        loss = self.head(hidden, batch["labels"], context)
        if self.free_batch:
            del context.batch[number]
        loss.backward()


def sized(parser: argparse.ArgumentParser) -> None:
    """The options of the model and of a micro-batch."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--intermediate", type=int, help="width of the layers' MLP [default: 4 x hidden]")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, default=128, help="of one optimizer step")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--detach", action="store_true", help="log losses without their graph")
    parser.add_argument("--free-batch", action="store_true", help="drop tokens after the last forward stage")
    parser.add_argument("--memory", type=float, help="cap the process to so many GiB of the GPU")
    sized(parser)
    options = parser.parse_args()
    if options.memory is not None and not options.device.startswith("cuda"):
        parser.error(
            f"--memory {options.memory:g} caps a GPU, and the device is {options.device!r}; leave it out"
        )
    return options


def build(options: argparse.Namespace, *, detach: bool, free_batch: bool) -> Schedule:
    """Model, optimizer and schedule: bf16 on a GPU, fp32 on a CPU."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.intermediate or 4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 128), vocab_size=options.vocabulary,
        attn_implementation="sdpa",
    )  # fmt: skip
    body = Body(config).to(device, dtype)
    head = Head(config, detach=detach).to(device, dtype)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-4)
    return Schedule(body, head, optimizer, free_batch=free_batch)


def drawer(options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """Draws the tokens of a micro-batch."""
    return lambda: torch.randint(options.vocabulary, (1, options.tokens + 1), device=options.device)


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    if options.memory is not None:
        total = torch.cuda.mem_get_info(options.device)[1]
        torch.cuda.set_per_process_memory_fraction(options.memory * 2**30 / total)
    schedule = build(options, detach=options.detach, free_batch=options.free_batch)
    losses = []
    for step in range(options.steps):
        began = time.perf_counter()
        losses.append(f"{schedule.run_step(options.micro_batches, drawer(options)):.6f}")
        took = time.perf_counter() - began
        print(f"step {step}: loss {losses[-1]}, {1e3 * took / options.micro_batches:.2f} ms a micro-batch")
    if options.out is not None:
        options.out.write_text(json.dumps({"losses": losses, "micro_batches": options.micro_batches}))


if __name__ == "__main__":
    main()
