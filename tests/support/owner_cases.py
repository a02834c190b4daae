"""What a program may have a tensor for, and what every census calls it."""

from __future__ import annotations

from memtriage.model.census import Owner

PRELUDE = """
import functools
import torch
from torch import nn

def T(n=100):
    return made(torch.ones(n))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(10, 10, bias=False)
        self.out = nn.Linear(10, 10, bias=False)
        self.out.weight = self.fc.weight
    def forward(self, x):
        return self.out(self.fc(x))

model = Net()
adam = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 10)).sum().backward()
adam.step()

class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)
    def __init__(self, data, scale):
        self.packed, self.scale = data, scale
    def __tensor_flatten__(self):
        return ['packed', 'scale'], None
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed, args[0].scale)
        raise NotImplementedError(func)

class ShardedFooOptimizer:
    '''Shaped like DeepSpeed's: flat master weights in lists, a torch optimizer inside, properties.'''
    def __init__(self, model_parameters):
        self.bit16_groups = [list(model_parameters)]
        self.fp32_groups = [T(), T()]
        self.averaged_gradients = {0: [T()]}
        self.optimizer = torch.optim.AdamW(self.fp32_groups)
    @property
    def param_groups(self):
        raise RuntimeError('not now')
    state = param_groups
    def step(self): pass
    def zero_grad(self): pass

class Quantized:
    '''Only duck-types as a tensor.'''
    def __init__(self):
        self._data, self._scale_inv = T(), T(1)

class Stash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = T()
        return x * 1
    @staticmethod
    def backward(ctx, g):
        return g
"""

CASES: dict[str, tuple[str, Owner]] = {
    "tied weight": ("made(model.fc.weight)", "parameter"),
    "weight in a state dict": ("checkpoint = made(model.fc.weight.detach())", "parameter"),
    "gradient": ("made(model.fc.weight.grad)", "gradient"),
    "Adam's moments": (
        "made(adam.state[model.fc.weight]['exp_avg']); made(adam.state[model.fc.weight]['exp_avg_sq'])",
        "optimizer state",
    ),
    "parameter outside of a module": (
        "loose = nn.Parameter(T()); sgd = torch.optim.SGD([loose], momentum=0.9)",
        "parameter",
    ),
    "momentum": (
        "loose.sum().backward(); sgd.step(); made(sgd.state[loose]['momentum_buffer'])",
        "optimizer state",
    ),
    "flat parameters": (
        "flat = T(200); flattened = nn.Module()\n"
        "flattened.a, flattened.b = nn.Parameter(flat[:100]), nn.Parameter(flat[100:])",
        "parameter",
    ),
    "flat gradients": (
        "flat_grad = T(200); flattened.a.grad, flattened.b.grad = flat_grad[:100], flat_grad[100:]",
        "gradient",
    ),
    "buffer": ("model.register_buffer('mask', T())", "buffer"),
    "buffer that is not saved": ("model.register_buffer('tmp', T(), persistent=False)", "buffer"),
    "plain attribute of a module": ("model.plain = T()", "variable"),
    "master weights of a wrapper": (
        "sharded = ShardedFooOptimizer(flattened.parameters())",
        "optimizer state",
    ),
    "retained gradient": (
        "out = torch.ones(100, requires_grad=True) * 2; out.retain_grad()\n"
        "out.sum().backward(); made(out.grad)",
        "gradient",
    ),
    "sparse gradient": (
        "embedding = nn.Embedding(9, 9, sparse=True); embedding(torch.tensor([1])).sum().backward()\n"
        "made(embedding.weight.grad._values())",
        "gradient",
    ),
    "saved and a variable": (
        "act = made(torch.ones(100, requires_grad=True).exp()); loss = act.sum()",
        "saved for backward",
    ),
    "context": ("stashed = Stash.apply(torch.ones(9, requires_grad=True))", "autograd context"),
    "cache": ("@functools.lru_cache\ndef table(n): return T()\ntable(1)", "known cache"),
    "variable": ("var = T()", "variable"),
    "average copy": ("ema = [made(t.detach().clone()) for t in model.parameters()]", "variable"),
    "parameter of a subclass": (
        "model.packed = nn.Parameter(Wrapped(T(), T(1)), requires_grad=False)",
        "parameter",
    ),
    "buffer of a subclass": ("model.register_buffer('wrapped', Wrapped(T(), T(1)))", "buffer"),
    "quantized objects": ("weights = [Quantized() for _ in range(2)]", "variable"),
}
