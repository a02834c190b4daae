"""A pipeline stage logs its loss inside a custom Function, before `apply` has given that loss a grad_fn.

`Function.apply` sets `grad_fn` in place on what `forward` returns. The very same object already sits in the
log, so the log keeps the context of every micro-batch, with the stage's input and its gradient.
Holds the memory: `losses["lm"]` -> grad_fn WrapBackward -> ctx.context.
Cure: log `loss.detach()`; and drop `ctx.context` once backward has used it.
"""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"

MICRO_BATCHES = 4
losses = {"lm": []}


class Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_, stage, labels):
        output, ctx.context = stage.forward_backward(input_, labels)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        stage, _, input_grad = ctx.context
        for parameter, gradient in stage.pending:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return input_grad * grad_output, None, None


class HeadStage:
    """Computes loss and gradients in one go, so that the logits never have to be kept."""

    def __init__(self, width, classes):
        self.weight = nn.Parameter(torch.randn(classes, width, device=device) / width**0.5)
        self.pending = []

    def forward_backward(self, input_, labels):
        probabilities = (input_ @ self.weight.t()).softmax(-1)
        picked = probabilities.gather(1, labels[:, None])
        loss = -picked.clamp_min(1e-9).log().mean()
        losses["lm"].append(loss)
        grad_logits = probabilities.scatter_add(1, labels[:, None], torch.full_like(picked, -1.0)) / len(
            labels
        )
        self.pending = [(self.weight, grad_logits.t() @ input_)]
        return loss, [self, input_, grad_logits @ self.weight]


def main():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(32, 128), nn.Tanh()).to(device)
    head = HeadStage(128, 16)
    optimizer = torch.optim.AdamW([*body.parameters(), head.weight], lr=1e-3)
    for step in range(1, 25):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            batch = torch.randn(256, 32, device=device)
            loss = Wrap.apply(body(batch), head, batch[:, :16].argmax(1))
            (loss / MICRO_BATCHES).backward()
        optimizer.step()
        if step % 8 == 0:
            mean = sum(loss.item() for loss in losses["lm"][-MICRO_BATCHES:]) / MICRO_BATCHES
            print(f"step {step}: loss {mean:.3f}")


if __name__ == "__main__":
    main()
