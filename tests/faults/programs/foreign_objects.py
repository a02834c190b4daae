"""Objects, classes and keys whose every protocol ends the program, in and beside the containers that leak."""

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
OF_KEYS = ("__repr__", "__str__", "__format__", "__index__", "__eq__", "isidentifier", "startswith")

Anything = type(
    "Anything", (), {**refusing(*ANY, *MORE), "__hash__": lambda self: 1,
                     "__class__": property(lambda self: refuse("__class__"))}
)  # fmt: skip
Hidden = type("Hidden", (), refusing("__getattribute__"))
Meta = type("Meta", (type,), refusing("__hash__", "__eq__", "__repr__", "__len__", "__instancecheck__"))
Mapping = type("Mapping", (dict,), refusing(*OF_CONTAINERS, "items", "keys", "values", "get"))
Listing = type("Listing", (list,), refusing(*OF_CONTAINERS))
Text = type("Text", (str,), {**refusing(*OF_KEYS), "__hash__": str.__hash__})
Number = type("Number", (int,), {**refusing(*OF_KEYS), "__hash__": int.__hash__})
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


keys = [Anything(), Text("key"), Number(3)]
by_key = {}
for key in keys:
    dict.__setitem__(by_key, key, [])
anything, hidden, of_meta = Anything(), Hidden(), OfMeta()
mapping, listing, layers, results = Mapping(), Listing(), [], []
everything = [anything, hidden, of_meta, OfMeta, mapping, listing]
for number in range(14):
    for kept in dict.values(by_key):
        kept.append(model(torch.randn(64, 64)))
    for holder in (anything, hidden, of_meta):
        own = object.__getattribute__(holder, "__dict__")
        own.setdefault("kept", []).append(model(torch.randn(64, 64)))
    dict.__setitem__(mapping, number, model(torch.randn(64, 64)))
    list.append(listing, model(torch.randn(64, 64)))
    layers.append(Layer(8, 8))
    results.append(Times.apply(torch.ones(3000, requires_grad=True)))
    step()
print(len(layers), len(results))
