"""Where the fields of torch's tensors and autograd nodes are: measured on tensors of this process.

The other process must have loaded the same files of torch (`same_build`), so they are the same there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from memtriage.outside.memory import OutsideError
from memtriage.outside.own_memory import own_bytes, own_words

_ODD_SIZE: Final = 12_347
"""Elements of the tensors that are measured: a number that no other field has."""
WRAPPER_WORDS: Final = 8
TENSOR_WORDS: Final = 24
STORAGE_WORDS: Final = 16
META_WORDS: Final = 32
_NODE_WORDS: Final = 120
_VIEW_NAME: Final = b"DifferentiableViewMeta"
_META_NAMES: Final = (b"AutogradMeta", _VIEW_NAME)

_Sample = tuple[list[int], Callable[[int], object]]
"""Words of an object that is measured, and whether one of them is the field that is looked for."""


@dataclass(frozen=True, slots=True)
class TorchLayout:
    """Offsets in bytes.

    Attributes:
        wrapper_tensor: of the C++ tensor in Python's object.
        tensor_storage, tensor_meta, tensor_wrapper: of the storage, of autograd's part, of Python's object.
        storage_data, storage_device, storage_size: in a storage.
        meta_gradient, meta_node, meta_base: in autograd's part: `.grad`, `.grad_fn`, and the base of a view.
        meta_retains: of the byte that says that a tensor that is no leaf keeps its gradient.
        node_edges, node_wrapper: in a node: next edges, Python's object.
        node_size: bytes of what all nodes have; what a node saves follows.
        edge_size: bytes of an edge.
        saved_size: bytes of a saved variable.
        saved_hooks: in a saved variable, of what the program's pack hooks returned.
        hooks_data: in that, of the value.
        function_node, function_saved: in the context of a custom Function: its node, its saved tensors.
        function_wrapper: in the node of a custom Function, its context: up to torch 2.11 it is no
            `node_wrapper`.
        leaf: in the node of a leaf, the leaf.
        node_names: names of saved attributes, in their order, by type of node.
        devices: names of devices by their number.
    """

    wrapper_tensor: int
    tensor_storage: int
    tensor_meta: int
    tensor_wrapper: int
    storage_data: int
    storage_device: int
    storage_size: int
    meta_gradient: int
    meta_node: int
    meta_base: int
    meta_retains: int
    node_edges: int
    node_wrapper: int
    node_size: int
    edge_size: int
    saved_size: int
    saved_hooks: int
    hooks_data: int
    function_node: int
    function_saved: int
    function_wrapper: int
    leaf: int
    node_names: dict[str, tuple[str, ...]]
    devices: dict[int, str]


def calibrate() -> TorchLayout:
    """Measure the layout on tensors that are made for it.

    Raises:
        OutsideError: a field is not found: this build of torch is not known.
    """
    import torch

    with torch.enable_grad():
        return _calibrate(torch)


class _Specimen:
    """Tensors that are measured, and words of their C++ objects.

    Bytes that no field fills have what the heap had there before, such as an old pointer to the same address.
    So each field is found on two specimens, whose values differ.

    Args:
        torch: the module.
        size: elements of its tensors: a number that no other field has.
    """

    def __init__(self, torch: Any, size: int) -> None:
        self.leaf = torch.zeros(size, requires_grad=True)
        self.other = torch.zeros(size, requires_grad=True)
        self.product = self.leaf * self.other
        self.view = self.leaf.view(1, size)
        self.storage = self.leaf.untyped_storage()
        self.wrapper = own_words(id(self.leaf), WRAPPER_WORDS)
        self.tensor = own_words(self.leaf._cdata, TENSOR_WORDS)
        self.stored = own_words(self.storage._cdata, STORAGE_WORDS)
        self.made_by = self.product.grad_fn
        self.node_at = own_words(id(self.made_by), 3)[2]
        self.node = own_words(self.node_at, _NODE_WORDS)
        self.accumulate = self.made_by.next_functions[0][0]
        self.accumulate_at = own_words(id(self.accumulate), 3)[2]

    def meta(self, tensor: Any, meta_at: int) -> list[int]:
        """Return autograd's part of one of its tensors as it is now."""
        return own_words(own_words(tensor._cdata, TENSOR_WORDS)[meta_at >> 3], META_WORDS)

    def is_saved(self, word: int) -> bool:
        return word in (self.leaf._cdata, self.other._cdata)


def _calibrate(torch: Any) -> TorchLayout:
    pair = _Specimen(torch, _ODD_SIZE), _Specimen(torch, _ODD_SIZE + 2)
    meta_at = _find("autograd's part of a tensor", *((one.tensor, _is_meta) for one in pair))
    edges = _find("the edges of a node", *((one.node, _vector_with(one.accumulate_at)) for one in pair))
    size = _find("what a node saves", *((one.node, one.is_saved) for one in pair))
    second = _find("what a node saves", *((one.node[(size >> 3) + 1 :], one.is_saved) for one in pair))
    hooks, data = _pack_hooks(torch, size)
    function_node, function_saved, function_wrapper, saved_size = _custom_function(torch)
    if not saved_size <= second + 8 < saved_size + 16:
        raise _unknown("what a node saves")
    begin, end = pair[0].node[edges >> 3], pair[0].node[(edges >> 3) + 1]
    return TorchLayout(
        wrapper_tensor=_find(
            "the tensor of a Python object", *((one.wrapper, one.leaf._cdata.__eq__) for one in pair)
        ),
        tensor_storage=_find(
            "the storage of a tensor", *((one.tensor, one.storage._cdata.__eq__) for one in pair)
        ),
        tensor_meta=meta_at,
        tensor_wrapper=_find(
            "the Python object of a tensor", *((one.tensor, id(one.leaf).__eq__) for one in pair)
        ),
        storage_data=_find(
            "the address of a storage", *((one.stored, one.storage.data_ptr().__eq__) for one in pair)
        ),
        storage_device=_device_offset(torch),
        storage_size=_find(
            "the size of a storage", *((one.stored, one.storage.nbytes().__eq__) for one in pair)
        ),
        meta_gradient=_gradient_offset(torch, pair, meta_at),
        meta_node=_find(
            "the node of a tensor",
            *((one.meta(one.product, meta_at), one.node_at.__eq__) for one in pair),
        ),
        meta_base=_find(
            "the base of a view",
            *((one.meta(one.view, meta_at), one.leaf._cdata.__eq__) for one in pair),
        ),
        meta_retains=_retains_offset(pair, meta_at),
        node_edges=edges,
        node_wrapper=_find(
            "the Python object of a node", *((one.node, id(one.made_by).__eq__) for one in pair)
        ),
        node_size=size,
        edge_size=(end - begin) // 2,
        saved_size=saved_size,
        saved_hooks=hooks,
        hooks_data=data,
        function_node=function_node,
        function_saved=function_saved,
        function_wrapper=function_wrapper,
        leaf=_find(
            "the leaf of a node",
            *((own_words(one.accumulate_at, _NODE_WORDS), one.leaf._cdata.__eq__) for one in pair),
        ),
        node_names=_node_names(torch),
        devices=_devices(torch),
    )


def _gradient_offset(torch: Any, pair: Sequence[_Specimen], meta_at: int) -> int:
    """Return the word that follows `.grad` from one value to another."""
    samples: list[_Sample] = []
    for one in pair:
        gradients = torch.zeros_like(one.leaf), torch.zeros_like(one.leaf)
        for gradient in gradients:
            one.leaf.grad = gradient
            samples.append((one.meta(one.leaf, meta_at), gradient._cdata.__eq__))
    return _find("a gradient", *samples)


def type_name_of(
    words: Callable[[int, int], list[int]], text: Callable[[int, int], bytes], table: int
) -> bytes:
    """Return the mangled name of the class that has a table of virtual functions.

    Args:
        words, text: read words and bytes.
        table: its address, which is the first word of an object.
    """
    information = words(table - 8, 1)[0] if table > 8 else 0
    name = words(information + 8, 1)[0] if information else 0
    return text(name, 300).split(b"\0")[0] if name else b""


def class_name(mangled: bytes) -> str:
    """Return the last name of a mangled one: `AccumulateGrad` of `N5torch8autograd14AccumulateGradE`.

    Empty where there is none.
    """
    at, name = int(mangled.startswith(b"N")), b""
    while at < len(mangled) and mangled[at : at + 1].isdigit():
        digits = at
        while mangled[digits : digits + 1].isdigit():
            digits += 1
        length = int(mangled[at:digits])
        name = mangled[digits : digits + length]
        at = digits + length
    return name.decode("ascii", "replace")


def _own_type_name(address: int) -> bytes:
    """Return the mangled name of the class of a C++ object of this process."""
    return type_name_of(own_words, own_bytes, own_words(address, 1)[0])


def _find(what: str, *samples: _Sample) -> int:
    """Return the offset in bytes of the first word that is it in all samples."""
    for at in range(min(len(words) for words, _ in samples)):
        if all(is_it(words[at]) is True for words, is_it in samples):
            return 8 * at
    raise _unknown(what)


def _unknown(what: str) -> OutsideError:
    import torch

    return OutsideError(f"reading from outside does not know the layout of torch {torch.__version__}: {what}")


def _is_meta(address: int) -> bool:
    name = _own_type_name(address) if address > 4096 else b""
    return any(part in name for part in _META_NAMES)


def _vector_with(element: int) -> Callable[[int], bool]:
    return lambda word: word > 4096 and own_words(word, 1)[0] == element


def _device_offset(torch: Any) -> int:
    """Return where a storage has the number of its kind of device: 0 for the host, another one for `meta`."""
    sizes = (_ODD_SIZE, _ODD_SIZE + 2)
    hosts = [torch.empty(size).untyped_storage() for size in sizes]
    metas = [torch.empty(size, device="meta").untyped_storage() for size in sizes]
    number = _device_number(torch, "meta")
    data = ((own_words(host._cdata, STORAGE_WORDS), host.data_ptr().__eq__) for host in hosts)
    pointer = 8 + _find("the address of a storage", *data)
    samples = [(own_bytes(host._cdata, 128), 0) for host in hosts]
    samples += [(own_bytes(meta._cdata, 128), number) for meta in metas]
    for at in range(pointer, 128):
        if all(raw[at] == value for raw, value in samples):
            return at
    raise _unknown("the device of a storage")


def _device_number(torch: Any, kind: str) -> int:
    """Return the number that C++ has for a kind of device: `torch.device` begins with it."""
    device = torch.device(kind)  # which must live until it is read
    return own_bytes(id(device) + 16, 1)[0]


def _devices(torch: Any) -> dict[int, str]:
    return {_device_number(torch, kind): kind for kind in ("cpu", "cuda", "meta", "xpu", "mps", "hpu")}


def _retains_offset(pair: Sequence[_Specimen], meta_at: int) -> int:
    """Return the byte that `retain_grad` sets."""
    found: set[int] = set(range(8 * META_WORDS))
    for one in pair:
        address = own_words(one.product._cdata, TENSOR_WORDS)[meta_at >> 3]
        before = own_bytes(address, 8 * META_WORDS)
        one.product.retain_grad()
        after = own_bytes(address, 8 * META_WORDS)
        found &= {at for at in range(len(before)) if before[at] == 0 and after[at] == 1}
    if len(found) != 1:
        raise _unknown("whether a gradient is retained")
    return found.pop()


def _pack_hooks(torch: Any, size: int) -> tuple[int, int]:
    """Return where a saved variable has its hooks, and these what the pack hook returned."""
    kept, saved = [], []
    for number in range(2):
        packed = [f"value {number}, which only the hook has"]
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, packed=packed: packed, lambda value: None
        ):
            node = torch.zeros(3, requires_grad=True).exp().grad_fn
        kept.append((node, packed))  # before torch 2.13, the Python object of a node dies with its last user
        saved.append(own_words(own_words(id(node), 3)[2] + size, 16))

    def has_hooks(word: int) -> bool:
        return word > 4096 and b"SavedVariableHooks" in _own_type_name(word)

    hooks = _find("pack hooks", *((words, has_hooks) for words in saved))
    values = (
        (own_words(words[hooks >> 3], 8), id(packed).__eq__)
        for words, (_, packed) in zip(saved, kept, strict=True)
    )
    return hooks, _find("what a pack hook returned", *values)


def _custom_function(torch: Any) -> tuple[int, int, int, int]:
    """Return where a context has its node and saved tensors, and the node it; bytes of a saved variable."""

    class Saves(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, one: Any, two: Any) -> Any:
            ctx.save_for_backward(one, two)
            return one * two

    inputs = [[torch.zeros(3, requires_grad=True) for _ in range(2)] for _ in range(2)]
    made = [Saves.apply(*pair) for pair in inputs]  # before torch 2.13 its node lives as long as it does
    contexts = [one.grad_fn for one in made]
    words = [own_words(id(one), type(one).__basicsize__ >> 3) for one in contexts]

    def size_of(at: int, context: list[int], saved: list[Any]) -> int:
        """Return the bytes of each of the two elements of a vector of what was saved; 0 where none is."""
        begin, end = context[at], context[at + 1]
        if not 4096 < begin < end <= begin + 1024 or (end - begin) % 16:
            return 0
        size = (end - begin) // 2
        held = own_words(begin, 1)[0], own_words(begin + size, 1)[0]
        return size if held == tuple(one._cdata for one in saved) else 0

    for at in range(2, len(words[0]) - 2):
        sizes = {size_of(at, context, saved) for context, saved in zip(words, inputs, strict=True)}
        if len(sizes) == 1 and (size := sizes.pop()):
            node = 16 + _find("the node of a custom Function", *((each[2:], _is_node) for each in words))
            nodes = [own_words(each[node >> 3], _NODE_WORDS) for each in words]
            back = (
                (each, lambda word, context=context: word & ~1 == id(context))
                for each, context in zip(nodes, contexts, strict=True)
            )
            return node, 8 * at, _find("the context of a custom Function", *back), size
    raise _unknown("what a custom Function saves")


def _is_node(word: int) -> bool:
    return word > 4096 and class_name(_own_type_name(word)) == "PyNode"


def _node_names(torch: Any) -> dict[str, tuple[str, ...]]:
    """Return the names of what each type of node saves, in the order in which C++ declares it."""
    names = {}
    for name, kind in vars(torch._C._functions).items():
        if isinstance(kind, type):
            raw = (attribute for attribute in vars(kind) if attribute.startswith("_raw_saved_"))
            names[name] = tuple(attribute.removeprefix("_raw_saved_") for attribute in raw)
    return names


def libraries() -> tuple[str, ...]:
    """Return parts of the names of torch's files whose layout must be the same."""
    return ("libtorch_python", "libtorch_cpu", "libc10.")
