"""Tensors of classes whose properties and protocols end the program if anybody asks them."""

import state
import torch
from training import step


class Functions(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise SystemExit(f"torch_function {function}")


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise SystemExit(f"dispatch {function}")


class Attributes(torch.Tensor):
    @property
    def grad(self):
        raise SystemExit("grad")

    @property
    def grad_fn(self):
        raise SystemExit("grad_fn")

    @property
    def requires_grad(self):
        raise SystemExit("requires_grad")

    @property
    def device(self):
        raise SystemExit("device")

    def untyped_storage(self):
        raise SystemExit("storage")

    def numel(self):
        raise SystemExit("numel")

    def __len__(self):
        raise SystemExit("len")


kept = []
for _ in range(14):
    with torch._C.DisableTorchFunctionSubclass():
        batch = torch.ones(20_000).as_subclass(Attributes)
        kept += [torch.ones(20_000).as_subclass(Functions), batch, Wrapper(torch.ones(20_000))]
    step(kept)
print(len(kept))
state.show("after")
