"""Where the fields of CPython's objects are: one table per minor version."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PythonLayout:
    """Offsets in bytes, from the start of each structure; `deque_block` is a number of entries.

    Attributes are named after CPython's structures and fields: `list_items` is `PyListObject.ob_item`.
    """

    # PyThreadState and what leads to the running frames
    runtime_interpreters: int = 40
    interpreter_threads: int = 16
    thread_next: int = 8
    thread_cframe: int = 56
    cframe_frame: int = 8
    # _PyInterpreterFrame
    frame_function: int = 0
    frame_locals: int = 24
    frame_code: int = 32
    frame_object: int = 40
    frame_previous: int = 48
    frame_stacktop: int = 64
    frame_owner: int = 69
    frame_values: int = 72
    # PyFrameObject, PyTracebackObject
    frame_object_back: int = 16
    frame_object_frame: int = 24
    frame_object_trace: int = 32
    traceback_next: int = 16
    traceback_frame: int = 24
    # PyGenObject
    generator_code: int = 16
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
    deque_size: int = 216
    number_digits: int = 24
    # functions and descriptors
    function_globals: int = 16
    function_name: int = 32
    function_qualified_name: int = 40
    function_code: int = 48
    function_defaults: int = 56
    function_keyword_defaults: int = 64
    function_closure: int = 72
    function_dict: int = 88
    function_module: int = 104
    function_annotations: int = 112
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
    exception_traceback: int = 40
    # words before an instance: the collector's two, then its dict, then its inline values
    managed_dict: int = -24
    managed_values: int = -32
    collector_head: int = 16
    # numpy's PyArrayObject
    array_base: int = 48


_TABLES: Final = {(3, 11): PythonLayout()}


def layout_of(version: tuple[int, int]) -> PythonLayout | None:
    """Return the table of a minor version of CPython on a 64-bit machine; None where there is none."""
    return _TABLES.get(version)


def versions() -> list[str]:
    """Return the minor versions that have a table."""
    return [f"{major}.{minor}" for major, minor in _TABLES]


def has_debug_build() -> bool:
    """Whether this interpreter was built with fields that the tables do not have."""
    return hasattr(sys, "gettotalrefcount") or hasattr(sys, "getobjects")
