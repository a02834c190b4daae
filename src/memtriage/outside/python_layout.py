"""Where the fields of CPython's objects are: one table per minor version."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class PythonLayout:
    """Offsets in bytes, from the start of each structure; `deque_block` is a number of entries.

    Attributes are named after CPython's structures and fields: `list_items` is `PyListObject.ob_item`.
    `thread_frame` leads to the running frame, through a `_PyCFrame` where there is `cframe_frame`. Of
    `managed_*`: instances have their values' address in a word of its own, in that of their dict with a tag,
    or else their values after themselves. `number_tag_bits` are low bits of an int's count of digits, and
    `stack_tags` those of a reference in a frame that are no part of the address. A frame has the end of its
    stack as a number (`frame_stacktop`), or as an address where there is `frame_stackpointer`.
    """

    # PyThreadState and what leads to the running frames
    runtime_interpreters: int = 40
    interpreter_next: int = 0
    interpreter_threads: int = 16
    thread_next: int = 8
    thread_frame: int = 56
    cframe_frame: int | None = 8
    # _PyInterpreterFrame
    frame_function: int = 0
    frame_locals: int = 24
    frame_code: int = 32
    frame_object: int = 40
    frame_previous: int = 48
    frame_stacktop: int = 64
    frame_stackpointer: int | None = None
    frame_owner: int = 69
    frame_values: int = 72
    stack_tags: int = 0
    # PyFrameObject, PyTracebackObject
    frame_object_back: int = 16
    frame_object_frame: int = 24
    frame_object_trace: int = 32
    traceback_next: int = 16
    traceback_frame: int = 24
    # PyGenObject
    generator_name: int = 32
    generator_exception: int = 48
    generator_state: int = 75
    generator_frame: int = 80
    # PyCodeObject
    code_flags: int = 48
    code_arguments: int = 56
    code_values: int = 76
    code_free: int = 92
    code_value_names: int = 96
    code_filename: int = 112
    code_name: int = 120
    # PyTypeObject, PyHeapTypeObject
    type_name: int = 24
    type_basic_size: int = 32
    type_item_size: int = 40
    type_flags: int = 168
    type_weaklist_offset: int = 208
    type_base: int = 256
    type_dict: int = 264
    type_dict_offset: int = 288
    type_bases: int = 336
    type_mro: int = 344
    type_qualified_name: int = 864
    type_cached_keys: int = 872
    # PyDictObject, PyDictKeysObject
    dict_keys: int = 32
    dict_values: int = 40
    dict_size: int = 48
    keys_log2_index_bytes: int = 9
    keys_kind: int = 10
    keys_entries: int = 24
    keys_indices: int = 32
    values_start: int = 0
    # PyUnicodeObject
    text_length: int = 16
    text_state: int = 32
    text_ascii: int = 48
    text_other: int = 72
    # the other containers
    size: int = 16
    list_items: int = 24
    list_size: int = 40
    tuple_items: int = 24
    set_mask: int = 32
    set_table: int = 40
    set_size: int = 200
    deque_left: int = 24
    deque_left_index: int = 40
    deque_block: int = 64
    deque_bound: int = 64
    deque_size: int = 216
    number_digits: int = 24
    number_tag_bits: int = 0
    # functions and descriptors
    function_globals: int = 16
    function_qualified_name: int = 40
    function_code: int = 48
    function_defaults: int = 56
    function_keyword_defaults: int = 64
    function_closure: int = 72
    function_dict: int = 88
    function_module: int = 104
    function_annotations: int = 112
    function_annotate: int | None = None
    cell_value: int = 16
    method_function: int = 16
    method_self: int = 24
    builtin_definition: int = 16
    builtin_self: int = 24
    builtin_module: int = 32
    module_dict: int = 16
    weakref_object: int = 16
    weakref_callback: int = 24
    member_definition: int = 40
    definition_offset: int = 16
    partial_function: int = 16
    lru_next: int = 24
    lru_key: int = 40
    lru_function: int = 56
    lru_bound: int = 96
    exception_traceback: int = 40
    # words before an instance: the collector's two, then its dict, then its inline values
    managed_dict: int = -24
    managed_values: int | None = -32
    managed_tagged: bool = False
    collector_head: int = 16
    # numpy's PyArrayObject
    array_base: int = 48


_3_12: Final = PythonLayout(
    interpreter_threads=72,
    cframe_frame=0,
    frame_function=16,
    frame_locals=40,
    frame_code=0,
    frame_object=48,
    frame_previous=8,
    frame_owner=70,
    generator_name=24,
    generator_exception=40,
    generator_state=67,
    generator_frame=72,
    code_arguments=52,
    code_values=72,
    code_free=88,
    type_qualified_name=872,
    type_cached_keys=880,
    text_ascii=40,
    text_other=56,
    number_tag_bits=3,
    managed_values=None,
    managed_tagged=True,
)
_3_13: Final = replace(
    _3_12,
    runtime_interpreters=632,
    interpreter_next=7264,
    interpreter_threads=7344,
    thread_frame=72,
    cframe_frame=None,
    values_start=8,
    managed_tagged=False,
)
_3_14: Final = replace(
    _3_13,
    runtime_interpreters=808,
    interpreter_next=7272,
    frame_function=16,
    frame_stackpointer=64,
    frame_owner=74,
    frame_values=80,
    stack_tags=3,
    tuple_items=32,
    function_annotate=120,
)
_TABLES: Final = {(3, 11): PythonLayout(), (3, 12): _3_12, (3, 13): _3_13, (3, 14): _3_14}


def layout_of(version: tuple[int, int]) -> PythonLayout | None:
    """Return the table of a minor version of CPython on a 64-bit machine; None where there is none."""
    return _TABLES.get(version)


def versions() -> list[str]:
    """Return the minor versions that have a table."""
    return [f"{major}.{minor}" for major, minor in _TABLES]


def is_special_build() -> bool:
    """Whether the objects of this interpreter have other fields: a debug or free-threaded build."""
    debug = hasattr(sys, "gettotalrefcount") or hasattr(sys, "getobjects")
    return debug or bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
