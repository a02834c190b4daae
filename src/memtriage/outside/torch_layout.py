"""Where the fields of torch's tensors and autograd nodes are: measured on tensors of this process.

The other process must have loaded the same files of torch (`same_build`), so they are the same there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from memtriage.outside.memory import OutsideError
from memtriage.outside.own_memory import own_bytes, own_words

_ODD_SIZE: Final = 12_347
"""Elements of the tensor that is measured: a number that no other field has."""
_TENSOR_WORDS: Final = 24
_META_WORDS: Final = 32
_NODE_WORDS: Final = 120
_VIEW_NAME: Final = b"DifferentiableViewMeta"
_META_NAMES: Final = (b"AutogradMeta", _VIEW_NAME)


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


def _calibrate(torch: Any) -> TorchLayout:
    leaf = torch.zeros(_ODD_SIZE, requires_grad=True)
    leaf.grad = torch.zeros(_ODD_SIZE)
    other = torch.zeros(_ODD_SIZE, requires_grad=True)
    product = leaf * other
    view = leaf.view(1, _ODD_SIZE)
    storage = leaf.untyped_storage()
    wrapper = own_words(id(leaf), 8)
    tensor = own_words(leaf._cdata, _TENSOR_WORDS)
    stored = own_words(storage._cdata, 16)
    meta_at = _find("autograd's part of a tensor", tensor, _is_meta)
    meta = own_words(tensor[meta_at >> 3], _META_WORDS)
    product_meta = own_words(own_words(product._cdata, _TENSOR_WORDS)[meta_at >> 3], _META_WORDS)
    view_meta = own_words(own_words(view._cdata, _TENSOR_WORDS)[meta_at >> 3], _META_WORDS)
    made_by = product.grad_fn
    node_at = own_words(id(made_by), 3)[2]
    node = own_words(node_at, _NODE_WORDS)
    accumulate = made_by.next_functions[0][0]
    accumulate_at = own_words(id(accumulate), 3)[2]
    edges = _find("the edges of a node", node, _vector_with(accumulate_at))
    size = _find("what a node saves", node, lambda word: word in (leaf._cdata, other._cdata))
    second = _find("what a node saves", node[(size >> 3) + 1 :], lambda w: w in (leaf._cdata, other._cdata))
    hooks, data = _pack_hooks(torch, size)
    function_node, function_saved, function_wrapper, saved_size = _custom_function(torch)
    if not saved_size <= second + 8 < saved_size + 16:
        raise _unknown("what a node saves")
    begin, end = node[edges >> 3], node[(edges >> 3) + 1]
    return TorchLayout(
        wrapper_tensor=_find("the tensor of a Python object", wrapper, leaf._cdata.__eq__),
        tensor_storage=_find("the storage of a tensor", tensor, storage._cdata.__eq__),
        tensor_meta=meta_at,
        tensor_wrapper=_find("the Python object of a tensor", tensor, id(leaf).__eq__),
        storage_data=_find("the address of a storage", stored, storage.data_ptr().__eq__),
        storage_device=_device_offset(torch),
        storage_size=_find("the size of a storage", stored, storage.nbytes().__eq__),
        meta_gradient=_find("a gradient", meta, leaf.grad._cdata.__eq__),
        meta_node=_find("the node of a tensor", product_meta, node_at.__eq__),
        meta_base=_find("the base of a view", view_meta, leaf._cdata.__eq__),
        meta_retains=_retains_offset(product, product_meta, meta_at),
        node_edges=edges,
        node_wrapper=_find("the Python object of a node", node, id(made_by).__eq__),
        node_size=size,
        edge_size=(end - begin) // 2,
        saved_size=saved_size,
        saved_hooks=hooks,
        hooks_data=data,
        function_node=function_node,
        function_saved=function_saved,
        function_wrapper=function_wrapper,
        leaf=_find("the leaf of a node", own_words(accumulate_at, _NODE_WORDS), leaf._cdata.__eq__),
        node_names=_node_names(torch),
        devices=_devices(torch),
    )


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
    """Return the last name of a mangled one: `AccumulateGrad` of `N5torch8autograd14AccumulateGradE`."""
    if not mangled.startswith(b"N"):
        return ""
    at, name = 1, b""
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


def _find(what: str, words: list[int], is_it: Callable[[int], object]) -> int:
    """Return the offset in bytes of the first word that is it."""
    for at, word in enumerate(words):
        if is_it(word) is True:
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
    host = torch.empty(_ODD_SIZE).untyped_storage()
    meta = torch.empty(_ODD_SIZE, device="meta").untyped_storage()
    number = _device_number(torch, "meta")
    on_host, on_meta = own_bytes(host._cdata, 128), own_bytes(meta._cdata, 128)
    pointer = 8 + _find("the address of a storage", own_words(host._cdata, 16), host.data_ptr().__eq__)
    for at in range(pointer, 128):
        if on_host[at] == 0 and on_meta[at] == number:
            return at
    raise _unknown("the device of a storage")


def _device_number(torch: Any, kind: str) -> int:
    """Return the number that C++ has for a kind of device: `torch.device` begins with it."""
    return own_bytes(id(torch.device(kind)) + 16, 1)[0]


def _devices(torch: Any) -> dict[int, str]:
    return {_device_number(torch, kind): kind for kind in ("cpu", "cuda", "meta", "xpu", "mps", "hpu")}


def _retains_offset(product: Any, meta: list[int], meta_at: int) -> int:
    """Return the byte that `retain_grad` sets."""
    address = own_words(product._cdata, _TENSOR_WORDS)[meta_at >> 3]
    before = own_bytes(address, 8 * _META_WORDS)
    product.retain_grad()
    after = own_bytes(address, 8 * _META_WORDS)
    changed = [at for at in range(len(before)) if before[at] == 0 and after[at] == 1]
    if len(changed) != 1:
        raise _unknown("whether a gradient is retained")
    return changed[0]


def _pack_hooks(torch: Any, size: int) -> tuple[int, int]:
    """Return where a saved variable has its hooks, and these what the pack hook returned."""
    packed = ["a value that only the hook has"]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed, lambda value: None):
        made = torch.zeros(3, requires_grad=True).exp()
    made_by = made.grad_fn
    node = own_words(id(made_by), 3)[2]
    for at, word in enumerate(own_words(node + size, 16)):
        if word > 4096 and b"SavedVariableHooks" in _own_type_name(word):
            return 8 * at, _find("what a pack hook returned", own_words(word, 8), id(packed).__eq__)
    raise _unknown("pack hooks")


def _custom_function(torch: Any) -> tuple[int, int, int, int]:
    """Return where a context has its node and saved tensors, and the node it; bytes of a saved variable."""

    class Saves(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, one: Any, two: Any) -> Any:
            ctx.save_for_backward(one, two)
            return one * two

    one, two = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    made = Saves.apply(one, two)  # before torch 2.13 its node lives as long as it does
    context = made.grad_fn
    words = own_words(id(context), type(context).__basicsize__ >> 3)
    for at in range(2, len(words) - 2):
        begin, end = words[at], words[at + 1]
        if 4096 < begin < end <= begin + 1024 and not (end - begin) % 16:
            size = (end - begin) // 2
            if own_words(begin, 1)[0] == one._cdata and own_words(begin + size, 1)[0] == two._cdata:
                node = _node_in(words)
                return node, 8 * at, _context_in(words[node >> 3], id(context)), size
    raise _unknown("what a custom Function saves")


def _context_in(node: int, context: int) -> int:
    words = own_words(node, _NODE_WORDS)
    return _find("the context of a custom Function", words, lambda word: word & ~1 == context)


def _node_in(words: list[int]) -> int:
    def is_node(word: int) -> bool:
        return word > 4096 and class_name(_own_type_name(word)) == "PyNode"

    return 16 + _find("the node of a custom Function", words[2:], is_node)


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
