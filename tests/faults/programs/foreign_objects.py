"""Objects, classes, keys and tensors whose every protocol ends the program, in containers that leak."""

import numpy
import state
import torch
from training import model, step


def refuse(what):
    print("asked for", what, flush=True)
    raise SystemExit(what)


def refusing(*names):
    return {name: (lambda self, *args, name=name, **kwargs: refuse(name)) for name in names}


ANY = ("__getattr__", "__eq__", "__repr__", "__str__", "__format__", "__len__", "__bool__", "__iter__")
MORE = ("__sizeof__", "__index__", "__contains__", "__call__", "__dir__", "__reduce_ex__")
OF_CONTAINERS = ("__len__", "__bool__", "__iter__", "__getitem__", "__contains__", "__repr__")
OF_ARRAYS = ("base", "nbytes", "dtype", "flags", "__array_interface__")
OF_KEYS = ("__repr__", "__str__", "__format__", "__index__", "__eq__", "isidentifier", "startswith")

NAMES = ("__module__", "__bases__", "__mro__")
OF_CLASSES = ("__hash__", "__eq__", "__repr__", "__len__", "__bool__", "__iter__", "__contains__", "__dir__")
of_names = {name: property(lambda self, name=name: refuse(name)) for name in NAMES}
Meta = type("Meta", (type,), {**refusing(*OF_CLASSES, "__instancecheck__", "__subclasscheck__"), **of_names})
Anything = Meta(
    "Anything", (), {**refusing(*ANY, *MORE), "__hash__": lambda self: 1,
                     "__class__": property(lambda self: refuse("__class__"))}
)  # fmt: skip
Key = Meta("Key", (), {**refusing(*ANY, *MORE), "__hash__": lambda self: id(self)})
Hidden = Meta("Hidden", (), refusing("__getattribute__"))
Mapping = Meta("Mapping", (dict,), refusing(*OF_CONTAINERS, "__sizeof__", "items", "keys", "values", "get"))
Listing = Meta("Listing", (list,), refusing(*OF_CONTAINERS, "__sizeof__"))
Pair = Meta("Pair", (tuple,), {**refusing(*OF_CONTAINERS), "_fields": (Anything(), Anything())})
Text = type("Text", (str,), {**refusing(*OF_KEYS), "__hash__": str.__hash__})
Number = type("Number", (int,), {**refusing(*OF_KEYS), "__hash__": int.__hash__})
Array = Meta("Array", (numpy.ndarray,), {name: property(lambda self: refuse("array")) for name in OF_ARRAYS})
of_modules = refusing("parameters", "named_parameters", "buffers", "named_modules", "state_dict", "__repr__")
Layer = type("Layer", (torch.nn.Linear,), of_modules)


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 2)
        ctx.kept = Anything()
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class OfMeta(metaclass=Meta):
    pass


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


keys = [Anything(), Text("key"), Number(3)]
by_key = {}
for key in keys:
    dict.__setitem__(by_key, key, [])
anything, hidden, of_meta = Anything(), Hidden(), OfMeta()
mapping, listing, layers, results, tensors = Mapping(), Listing(), [], [], []
pairs, logged, arrays = [], {}, []
everything = [anything, hidden, of_meta, OfMeta, mapping, listing, Array((4,)), *map(type, keys)]
for number in range(14):
    for kept in dict.values(by_key):
        kept.append(model(torch.randn(64, 64)))
    for holder in (anything, hidden, of_meta):
        own = object.__getattribute__(holder, "__dict__")
        own.setdefault("kept", []).append(model(torch.randn(64, 64)))
    dict.__setitem__(mapping, number, model(torch.randn(64, 64)))
    list.append(listing, model(torch.randn(64, 64)))
    pairs.append(Pair((model(torch.randn(64, 64)), number)))
    logged[Key()] = [Anything() for _ in range(2000)]
    arrays.append(Array((5000,)))
    layers.append(Layer(8, 8))
    results.append(Times.apply(torch.ones(3000, requires_grad=True)))
    with torch._C.DisableTorchFunctionSubclass():
        batch = torch.ones(20_000).as_subclass(Attributes)
        tensors += [torch.ones(20_000).as_subclass(Functions), batch, Wrapper(torch.ones(20_000))]
    step()
print(len(layers), len(results), len(tensors))
state.show("after")
