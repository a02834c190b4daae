"""Python objects of another process: their types, and what they refer to, as the cyclic collector sees it."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from memtriage.outside.memory import RemoteMemory, Words
from memtriage.outside.python_layout import PythonLayout
from memtriage.outside.values import MOST_ITEMS, RemoteValues, Translate

_MOST_BASES: Final = 100
_MOST_VARIABLES: Final = 5_000
_LARGEST_INSTANCE: Final = 1 << 14
HIGHEST: Final = 1 << 48
"""Above the addresses of a user's process."""

_INLINE_VALUES: Final = 1 << 2
_MANAGED_DICT: Final = 1 << 4
HEAP_TYPE: Final = 1 << 9
"""Of `tp_flags`: a class that Python code or `PyType_FromSpec` made."""
_TYPE_SUBCLASS: Final = 1 << 31
_VALID: Final = 0xFF << 24
"""Of the first word of values in an instance: the byte that says that they are in use."""
_SUSPENDED_OR_RUNNING: Final = 1
"""A generator whose state is below this still has its variables."""
FRAME_OBJECT_OWNS: Final = 2
"""`owner` of a frame that outlived its function. Higher ones are no functions of Python."""
_IS_FUNCTION: Final = 1
_DEQUE: Final = "collections.deque"
"""Since Python 3.12 it is made when a program starts, so its place is not that of this process's."""

Referents = Callable[[int, "RemoteType"], list[int]]


@dataclass(slots=True)
class RemoteType:
    """A class of the other process.

    Attributes:
        address: of the class.
        name, qualified_name, module: as Python has them.
        bases: names ("module.name") of the class and its bases, in the order of attribute look-up.
        lineage: their addresses.
        size: bytes of an instance, without its items.
        own_from: where in an instance its slots begin: after what its first built-in base has.
        skipped: offsets of an instance's words that are not followed: its dict, its weak references.
        flags, dict_offset, item_size: as CPython has them.
        cached_keys: address of the names of the attributes that instances have without a dict.
        shape: address of the built-in class whose layout instances have.
        referents: reads what an instance refers to.
        kind: how the walk treats instances (`memtriage.observe.kinds`).
        slots: names of the slots by their offset, of the class and its bases; filled when asked for.
    """

    address: int
    name: str
    qualified_name: str
    module: str
    bases: tuple[str, ...]
    lineage: tuple[int, ...]
    size: int
    own_from: int
    skipped: frozenset[int]
    flags: int
    dict_offset: int
    item_size: int
    cached_keys: int
    shape: int
    referents: Referents
    kind: int = -1
    slots: dict[int, str] | None = None

    @property
    def managed(self) -> bool:
        """Instances have their dict, or its values, before themselves."""
        return bool(self.flags & _MANAGED_DICT)

    @property
    def is_class(self) -> bool:
        """Instances are classes themselves."""
        return bool(self.flags & _TYPE_SUBCLASS)


@dataclass(slots=True)
class Frame:
    """The variables of a function that runs, is suspended, or ended with an error.

    Attributes:
        address: of the interpreter's frame.
        name: of the function.
        file: its source file.
        own_object: address of Python's object for it; 0 where it has none.
        variables: (name, address of the value) of those that are bound.
    """

    address: int
    name: str
    file: str
    own_object: int = 0
    variables: list[tuple[str, int]] = field(default_factory=list)


class RemoteHeap(RemoteValues):
    """Reads objects of another process.

    Args:
        translate: where the built-in classes of this Python are in it.
        before: an earlier reading of the same process: a class that is the same as there is not read again.

    Attributes:
        fixed: offsets of what instances refer to, by those built-in classes that have it in fixed places.
    """

    def __init__(
        self,
        memory: RemoteMemory,
        layout: PythonLayout,
        translate: Translate,
        before: RemoteHeap | None = None,
    ) -> None:
        super().__init__(memory, layout, translate)
        self._before = before
        self._types: dict[int, RemoteType | None] = {}
        self._built_in: dict[int, type] = {}
        self._readers: dict[int, Referents] = {}
        self._derived: dict[tuple[int, tuple[type, ...]], bool] = {}
        self._reading: set[int] = set()
        self._declared: dict[int, frozenset[str]] = {}
        self.null_type = self._address_of(type)
        self.fixed = _fixed(layout)
        for klass, reader in self._shapes():
            address = translate(id(klass))
            if address is not None:
                self._readers[address] = reader
                self._built_in[address] = klass

    def _shapes(self) -> Iterable[tuple[type, Referents]]:
        return (
            (dict, self._dict_referents),
            (list, lambda address, klass: self.list_items(address)[::-1]),
            (tuple, lambda address, klass: self.tuple_items(address)[::-1]),
            (set, lambda address, klass: self.set_items(address)),
            (frozenset, lambda address, klass: self.set_items(address)),
            (deque, self._deque_referents),
            (type, self._class_referents),
            (types.GeneratorType, self._generator_referents),
            (types.CoroutineType, self._generator_referents),
            (types.AsyncGeneratorType, self._generator_referents),
            (types.FrameType, self._frame_object_referents),
            *((klass, self._reader_at(offsets)) for klass, offsets in self.fixed.items()),
        )

    def _reader_at(self, offsets: list[int]) -> Referents:
        return lambda address, klass: [self.memory.word(address + offset) for offset in offsets]

    # --- types ---

    def type_of(self, address: int) -> RemoteType | None:
        """Return the class of an object; None where there is no object."""
        klass = self.memory.word(address + 8)
        try:
            return self._types[klass]
        except KeyError:
            return self.class_at(klass)

    def class_at(self, address: int) -> RemoteType | None:
        """Return the class at an address; None where there is none."""
        if address in self._types:
            return self._types[address]
        if address & 7 or address in self._reading or len(self._reading) > _MOST_BASES:
            return None
        if not self._is_class(address):
            return None
        self._reading.add(address)
        try:
            found = self._types[address] = self._recalled(address) or self._read_class(address)
        finally:
            self._reading.discard(address)
        return found

    def _recalled(self, address: int) -> RemoteType | None:
        """Return a class as the reading before has it; None where it is new, or its fields have changed."""
        before = self._before
        known = None if before is None else before._types.get(address)
        if before is None or known is None:
            return None
        size = self.layout.type_cached_keys  # all fields but the count of references, which comes first
        if self.memory.text_bytes(address + 8, size) != before.memory.text_bytes(address + 8, size):
            return None
        for base in known.lineage[1:]:
            self.class_at(base)
        self._know_deque(known.bases[0], known.size, address)
        if address in before._declared:
            self._declared[address] = before._declared[address]
        reader = self._reader_of(known.bases, known.shape if address == known.shape else 0)
        return replace(known, referents=reader)

    def _know_deque(self, name: str, size: int, address: int) -> None:
        if name == _DEQUE and size == self.layout.deque_size and address not in self._readers:
            self._readers[address], self._built_in[address] = self._deque_referents, deque

    def _is_class(self, address: int) -> bool:
        """Whether an object says, and its class says, that it is a class."""
        memory, layout = self.memory, self.layout
        meta = memory.word(address + 8)
        for _ in range(_MOST_BASES):
            if not meta or meta & 7:
                return False
            if not memory.word(meta + layout.type_flags) & _TYPE_SUBCLASS:
                return False
            if meta == self.null_type:
                return True
            meta = memory.word(meta + 8)
        return False

    def _read_class(self, address: int) -> RemoteType | None:
        memory, layout = self.memory, self.layout
        flags = memory.word(address + layout.type_flags)
        mro = tuple(self.tuple_items(memory.word(address + layout.type_mro))[:_MOST_BASES])
        if not mro or mro[0] != address:
            return None
        name = self.c_text(memory.word(address + layout.type_name))
        size = memory.word(address + layout.type_basic_size)
        if not name or not 16 <= size <= _LARGEST_INSTANCE:
            return None
        module, _, short = name.rpartition(".")
        qualified = short
        if flags & HEAP_TYPE:
            said = self.text(self.dict_value(memory.word(address + layout.type_dict), "__module__"))
            module = said or module
            qualified = self.text(memory.word(address + layout.type_qualified_name)) or short
        module = module or "builtins"
        bases = [known for base in mro[1:] if (known := self.class_at(base)) is not None]
        names = (f"{module}.{short}", *(f"{base.module}.{base.name}" for base in bases))
        self._know_deque(names[0], size, address)
        shape = next((base for base in mro if base in self._readers), 0)
        offsets = {memory.signed(base + layout.type_weaklist_offset) for base in mro}
        dict_offset = memory.signed(address + layout.type_dict_offset)
        own_from = 16
        if shape:
            own_from = memory.word(shape + layout.type_basic_size)
        reader = self._reader_of(names, shape if mro[0] == shape else 0)
        return RemoteType(
            address=address,
            name=short,
            qualified_name=qualified,
            module=module,
            bases=names,
            lineage=mro,
            size=size,
            own_from=own_from,
            skipped=frozenset(offset for offset in (*offsets, dict_offset) if offset > 0),
            flags=flags,
            dict_offset=dict_offset,
            item_size=memory.word(address + layout.type_item_size),
            cached_keys=memory.word(address + layout.type_cached_keys) if flags & HEAP_TYPE else 0,
            shape=shape,
            referents=reader,
        )

    def _reader_of(self, names: tuple[str, ...], exact: int) -> Referents:
        if exact:
            return self._readers[exact]
        if "functools._lru_cache_wrapper" in names:
            return self._lru_referents
        return self._instance_referents

    def built_in(self, address: int) -> type | None:
        """Return the built-in class of Python at an address; None where none of those that are known is."""
        return self._built_in.get(address)

    def is_read_alone(self, klass: RemoteType) -> bool:
        """Whether instances are read by a rule of their class alone."""
        return klass.referents == self._lru_referents

    def is_a(self, klass: RemoteType, *built_in: type) -> bool:
        """Whether a class is one of some built-in classes of Python, or derives from one."""
        known = self._derived.get((klass.address, built_in))
        if known is None:
            known = any(self._built_in.get(base) in built_in for base in klass.lineage)
            self._derived[klass.address, built_in] = known
        return known

    def is_exactly(self, klass: RemoteType, built_in: type) -> bool:
        """Whether a class is a built-in class of Python."""
        return self._built_in.get(klass.address) is built_in

    def declares(self, klass: RemoteType, *names: str) -> bool:
        """Whether a class or its bases define all of some attributes."""
        return set(names) <= self._names_of(klass)

    def _names_of(self, klass: RemoteType) -> set[str]:
        """Return the names that a class and its bases define."""
        found: set[str] = set()
        for base in klass.lineage:
            names = self._declared.get(base)
            if names is None:
                items = self.named_items(self.memory.word(base + self.layout.type_dict))
                names = self._declared[base] = frozenset(name for name, _ in items)
            found |= names
        return found

    def slot_name(self, holder: int, klass: RemoteType, value: int) -> str | None:
        """Return the name of the slot of an instance that has a value; None where none has."""
        if klass.slots is None:
            klass.slots = self._slots(klass)
        for offset, name in klass.slots.items():
            if self.memory.word(holder + offset) == value:
                return name
        return None

    def _slots(self, klass: RemoteType) -> dict[int, str]:
        slots: dict[int, str] = {}
        memory, layout = self.memory, self.layout
        member_type = self._address_of(types.MemberDescriptorType)
        for base in klass.lineage:
            for name, member in self.named_items(memory.word(base + layout.type_dict)):
                if memory.word(member + 8) == member_type:
                    definition = memory.word(member + layout.member_definition)
                    offset = memory.word(definition + layout.definition_offset)
                    if 16 <= offset < _LARGEST_INSTANCE:
                        slots.setdefault(offset, name)
        return slots

    def bound(self, address: int, klass: RemoteType) -> int | None:
        """Return how many entries a deque or a cache of `functools.lru_cache` takes; None for no bound."""
        if self.is_a(klass, deque):
            bound = self.memory.signed(address + self.layout.deque_bound)
        elif self.is_read_alone(klass):
            bound = self.memory.signed(address + self.layout.lru_bound)
        else:
            return None
        return bound if bound >= 0 else None

    # --- instances ---

    def instance_dict(self, address: int, klass: RemoteType) -> int:
        """Return the address of an instance's dict; 0 where it has none (yet)."""
        if klass.managed:
            own = self.memory.word(address + self.layout.managed_dict)
            return 0 if self.layout.managed_tagged and own & 1 else own
        offset = klass.dict_offset
        if offset < 0:
            length = abs(self.memory.signed(address + self.layout.size))
            if length > MOST_ITEMS:
                return 0
            offset += klass.size + length * klass.item_size + 7 & ~7
        return self.memory.word(address + offset) if offset else 0

    def inline_values(self, address: int, klass: RemoteType) -> list[tuple[str, int]]:
        """Return (name, value) of the attributes that an instance has without a dict."""
        values = self._own_values(address, klass)
        if not values:
            return []
        items = ((self.text(key), value) for key, value in self._entries(klass.cached_keys, values))
        return [(name, value) for name, value in items if name is not None]

    def _own_values(self, address: int, klass: RemoteType) -> int:
        """Return the address of the values that an instance has without a dict; 0 for none."""
        layout, memory = self.layout, self.memory
        if not klass.managed:
            return 0
        if layout.managed_values is not None:
            return memory.word(address + layout.managed_values)
        if layout.managed_tagged:
            own = memory.word(address + layout.managed_dict)
            return own + 1 if own & 1 else 0
        values = address + klass.size
        return values if klass.flags & _INLINE_VALUES and memory.word(values) & _VALID else 0

    def managed(self, addresses: Words, sizes: Words, flags: Words) -> tuple[Words, Words]:
        """Return the addresses of instances' inline values and of their dicts; 0 for none.

        Args:
            addresses: of instances whose class has the flag of a managed dict.
            sizes, flags: of their classes.
        """
        layout, memory = self.layout, self.memory
        own = memory.data[memory.places(addresses + layout.managed_dict)]
        if layout.managed_values is not None:
            return memory.data[memory.places(addresses + layout.managed_values)], own
        if layout.managed_tagged:
            tagged = own & 1 != 0
            return np.where(tagged, own + 1, 0), np.where(tagged, 0, own)
        values = addresses + sizes
        valid = memory.data[memory.places(values)] & _VALID != 0
        return np.where(valid & (flags & _INLINE_VALUES != 0), values, 0), own

    def attributes(self, address: int, klass: RemoteType) -> list[tuple[str, int]]:
        """Return (name, value) of an instance's attributes, wherever it has them."""
        own = self.instance_dict(address, klass)
        return self.named_items(own) if own else self.inline_values(address, klass)

    def attribute(self, address: int, klass: RemoteType, name: str) -> int:
        """Return the address of an instance's attribute; 0 where it has none of that name."""
        return next((value for key, value in self.attributes(address, klass) if key == name), 0)

    # --- what objects refer to ---

    def referents(self, address: int) -> list[int]:
        """Return what an object refers to, as the collector sees it. Some may be no objects."""
        klass = self.type_of(address)
        return [] if klass is None else klass.referents(address, klass)

    def _instance_referents(self, address: int, klass: RemoteType) -> list[int]:
        """Slots, attributes, the class, then what the built-in base has.

        Of classes written in C the layout is not known: each of their words that is the address of an object
        counts as a reference. Python's allocators align objects to 16 bytes.
        """
        found: list[int] = []
        start = klass.own_from
        if klass.size > start:
            skipped = klass.skipped
            words = self.memory.words(address + start, (klass.size - start) >> 3)
            found += [
                word
                for at, word in enumerate(words)
                if 4096 < word < HIGHEST and not word & 15 and start + 8 * at not in skipped
            ]
        if klass.managed:
            values = self._own_values(address, klass)
            if values:
                found += [value for _, value in self._entries(klass.cached_keys, values)]
        own = self.instance_dict(address, klass)
        if own:
            found.append(own)
        found.append(klass.address)
        if klass.shape:
            found += self._readers[klass.shape](address, klass)
        return found

    def _deque_referents(self, address: int, klass: RemoteType) -> list[int]:
        return self.deque_items(address)

    def _dict_referents(self, address: int, klass: RemoteType) -> list[int]:
        entries = self.dict_items(address)
        keys = self.memory.word(address + self.layout.dict_keys)
        if self.memory.byte(keys + self.layout.keys_kind):  # all keys are strings
            return [value for _, value in entries]
        return [part for entry in entries for part in entry]

    def _class_referents(self, address: int, klass: RemoteType) -> list[int]:
        memory, layout = self.memory, self.layout
        if not memory.word(address + layout.type_flags) & HEAP_TYPE:
            return []
        offsets = (layout.type_dict, layout.type_mro, layout.type_bases, layout.type_base)
        return [memory.word(address + offset) for offset in offsets]

    def _lru_referents(self, address: int, klass: RemoteType) -> list[int]:
        memory, layout = self.memory, self.layout
        found: list[int] = []
        before, link = address, memory.word(address + layout.lru_next)
        # A ring that changed while it was copied may lead into one without an end: each link knows the last.
        while link and link != address and memory.word(link + layout.lru_next - 8) == before:
            found += memory.words(link + layout.lru_key, 2)
            before, link = link, memory.word(link + layout.lru_next)
        start = layout.lru_function
        words = memory.words(address + start, (klass.size - start) >> 3)
        weak = next((offset for offset in klass.skipped if offset != klass.dict_offset), 0)
        return found + [w for at, w in enumerate(words) if start + 8 * at != weak]

    # --- functions that run, or ran ---

    def frame(self, address: int) -> Frame | None:
        """Return the frame at an address; None where there is none."""
        memory, layout = self.memory, self.layout
        code = memory.word(address + layout.frame_code) & ~layout.stack_tags
        if not address or not code or memory.word(code + 8) != self._code_type:
            return None
        name = self.text(memory.word(code + layout.code_name)) or "?"
        file = self.text(memory.word(code + layout.code_filename)) or ""
        frame = Frame(address, name, file, memory.word(address + layout.frame_object))
        if not memory.half(code + layout.code_flags) & _IS_FUNCTION:
            return frame
        names = self.tuple_items(memory.word(code + layout.code_value_names))
        count = min(memory.half(code + layout.code_values), len(names), _MOST_VARIABLES)
        values = self._untagged(memory.words(address + layout.frame_values, count))
        cell = self._address_of(types.CellType)
        for name_address, value in zip(names, values, strict=False):
            if value and memory.word(value + 8) == cell:
                value = memory.word(value + layout.cell_value)
            text = self.text(name_address)
            if value and text is not None:
                frame.variables.append((text, value))
        return frame

    def variables_of_module(self, frame: Frame) -> list[tuple[str, int]]:
        """Return (name, address of the value) of what the code of a module has set so far."""
        variables = self.memory.word(frame.address + self.layout.frame_locals)
        named = [(self.text(key), value) for key, value in self.dict_items(variables)] if variables else []
        return [(name, value) for name, value in named if name is not None]

    @functools.cached_property
    def _code_type(self) -> int:
        return self._address_of(types.CodeType)

    def generator_frame(self, address: int) -> int:
        """Return the address of a generator's frame; 0 once it has ended."""
        state = self.memory.byte(address + self.layout.generator_state)
        state = state - 256 if state > 127 else state
        return address + self.layout.generator_frame if state < _SUSPENDED_OR_RUNNING else 0

    def _generator_referents(self, address: int, klass: RemoteType) -> list[int]:
        frame = self.generator_frame(address)
        exception = self.memory.word(address + self.layout.generator_exception)
        return [*(self._frame_referents(frame) if frame else ()), exception]

    def _frame_referents(self, frame: int) -> list[int]:
        memory, layout = self.memory, self.layout
        values = frame + layout.frame_values
        if layout.frame_stackpointer is None:
            stacktop = memory.half(frame + layout.frame_stacktop)
        else:
            stacktop = memory.word(frame + layout.frame_stackpointer) - values >> 3
        function = memory.word(frame + layout.frame_function)
        if not 0 <= stacktop <= _MOST_VARIABLES:  # it runs, and has no top that could be read
            code = memory.word(frame + layout.frame_code) & ~layout.stack_tags
            is_code = code and memory.word(code + 8) == self._code_type
            stacktop = min(memory.half(code + layout.code_values), _MOST_VARIABLES) if is_code else 0
        found = [memory.word(frame + layout.frame_locals), *self._untagged([function])]
        return found + self._untagged(memory.words(values, stacktop))

    def _untagged(self, references: list[int]) -> list[int]:
        """Return the addresses that references of a frame have; 0 for none, and for a number."""
        tags = self.layout.stack_tags
        if not tags:
            return references
        return [0 if reference & tags == tags else reference & ~tags for reference in references]

    def _frame_object_referents(self, address: int, klass: RemoteType) -> list[int]:
        memory, layout = self.memory, self.layout
        found = [
            memory.word(address + layout.frame_object_back),
            memory.word(address + layout.frame_object_trace),
        ]
        frame = memory.word(address + layout.frame_object_frame)
        if frame and memory.byte(frame + layout.frame_owner) == FRAME_OBJECT_OWNS:
            found += self._frame_referents(frame)
        return found


def _fixed(layout: PythonLayout) -> dict[type, list[int]]:
    import weakref

    of_function = (
        layout.function_globals, layout.function_module, layout.function_defaults,
        layout.function_keyword_defaults, layout.function_dict, layout.function_closure,
        layout.function_annotations, layout.function_annotate,
    )  # fmt: skip
    weak = (weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType)
    return {
        types.FunctionType: [offset for offset in of_function if offset is not None],
        types.CellType: [layout.cell_value],
        types.MethodType: [layout.method_function, layout.method_self],
        types.BuiltinFunctionType: [layout.builtin_self, layout.builtin_module],
        types.ModuleType: [layout.module_dict],
        types.TracebackType: [layout.traceback_next, layout.traceback_frame],
        **{klass: [layout.weakref_callback] for klass in weak},
    }
