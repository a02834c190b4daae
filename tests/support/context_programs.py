"""What programs of tests have in common that keep tensors in an autograd context."""

KEEPS_IN_CONTEXT = """
    class Wrap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, loss):
            ctx.context = [x, x * 2]
            return loss * 1

        @staticmethod
        def backward(ctx, grad):
            return None, grad
"""
"""A function whose context keeps its input and one tensor more; indented as programs in tests are."""
