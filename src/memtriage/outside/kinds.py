"""How objects of another process are walked, by their class, as in `memtriage.observe.kinds`."""

from __future__ import annotations

from types import ModuleType

from memtriage.observe.kinds import (
    ARRAY,
    ATOM,
    BOUNDARY,
    KLASS,
    MODULE,
    NODE,
    OPTIMIZER,
    PLACEHOLDER,
    PLAIN,
    TENSOR,
    KindTable,
)
from memtriage.outside.objects import RemoteHeap, RemoteType
from memtriage.outside.values import Translate


class Kinds:
    """How objects of each class are walked, by the address of the class."""

    def __init__(self, heap: RemoteHeap, translate: Translate) -> None:
        self._heap = heap
        self.known: dict[int, int] = {}
        table = KindTable()
        for own, kind in table.known.items():
            address = translate(own)
            if address is not None and kind == ATOM:
                self.known[address] = ATOM
        table.clear()

    def of_class(self, address: int) -> int:
        """Return the kind of the instances of a class; `ATOM` where there is no class."""
        known = self.known.get(address)
        if known is None:
            klass = self._heap.class_at(address)
            if klass is None:
                return ATOM
            if klass.kind < 0:
                klass.kind = self._classify(klass)
            known = self.known[address] = klass.kind
        return known

    def _classify(self, klass: RemoteType) -> int:
        bases = klass.bases
        if "torch.Tensor" in bases:
            return TENSOR
        if klass.is_class:
            return KLASS
        first, second, *_ = [*klass.module.split("."), "", ""]
        if self._heap.is_a(klass, ModuleType) or (first == "memtriage" and second != "treat"):
            return BOUNDARY
        if self._heap.declares(klass, "next_functions", "_register_hook_dict"):
            return NODE
        if bases[0] == "torch.utils.checkpoint._Holder":
            return PLACEHOLDER
        if "torch.nn.modules.module.Module" in bases:
            return MODULE
        if "torch.optim.optimizer.Optimizer" in bases or (
            "Optim" in klass.name and self._heap.declares(klass, "step", "zero_grad")
        ):
            return OPTIMIZER
        return ARRAY if "numpy.ndarray" in bases else PLAIN
