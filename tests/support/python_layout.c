/* Print the offsets of `memtriage.outside.python_layout.PythonLayout` as the headers of a Python have them.

   cc -I include/python3.13 -I include/python3.13/internal tests/support/python_layout.c && ./a.out

   Structures that no header has (deque, lru_cache, partial, module) are checked by reading objects alone. */
#define Py_BUILD_CORE 1
#include <Python.h>
#include <structmember.h>
#include <stddef.h>
#include <stdio.h>
#include "internal/pycore_code.h"
#include "internal/pycore_dict.h"
#include "internal/pycore_frame.h"
#include "internal/pycore_gc.h"
#include "internal/pycore_interp.h"
#include "internal/pycore_runtime.h"
#if PY_VERSION_HEX >= 0x030e0000
#include "internal/pycore_interpframe_structs.h"
#endif

#if PY_VERSION_HEX >= 0x030c0000
#define FRAME_FUNCTION f_funcobj
#define DIGITS long_value.ob_digit
#else
#define FRAME_FUNCTION f_func
#define DIGITS ob_digit
#endif
#if PY_VERSION_HEX >= 0x030d0000
#define FRAME_CODE f_executable
#define THREAD_FRAME current_frame
#else
#define FRAME_CODE f_code
#define THREAD_FRAME cframe
#endif

#define NUMBER(name, value) printf("%s %ld\n", #name, (long)(value))
#define OFFSET(name, type, field) NUMBER(name, offsetof(type, field))

int main(void)
{
    OFFSET(runtime_interpreters, _PyRuntimeState, interpreters.head);
    OFFSET(interpreter_next, PyInterpreterState, next);
    OFFSET(interpreter_threads, PyInterpreterState, threads.head);
    OFFSET(thread_next, PyThreadState, next);
    OFFSET(thread_frame, PyThreadState, THREAD_FRAME);
#if PY_VERSION_HEX < 0x030d0000
    OFFSET(cframe_frame, _PyCFrame, current_frame);
#endif
    OFFSET(frame_function, _PyInterpreterFrame, FRAME_FUNCTION);
    OFFSET(frame_locals, _PyInterpreterFrame, f_locals);
    OFFSET(frame_code, _PyInterpreterFrame, FRAME_CODE);
    OFFSET(frame_object, _PyInterpreterFrame, frame_obj);
    OFFSET(frame_previous, _PyInterpreterFrame, previous);
#if PY_VERSION_HEX < 0x030e0000
    OFFSET(frame_stacktop, _PyInterpreterFrame, stacktop);
#endif
    OFFSET(frame_owner, _PyInterpreterFrame, owner);
    OFFSET(frame_values, _PyInterpreterFrame, localsplus);
    OFFSET(frame_object_back, struct _frame, f_back);
    OFFSET(frame_object_frame, struct _frame, f_frame);
    OFFSET(frame_object_trace, struct _frame, f_trace);
    OFFSET(traceback_next, PyTracebackObject, tb_next);
    OFFSET(traceback_frame, PyTracebackObject, tb_frame);
    OFFSET(generator_name, PyGenObject, gi_name);
    OFFSET(generator_exception, PyGenObject, gi_exc_state);
    OFFSET(generator_state, PyGenObject, gi_frame_state);
    OFFSET(generator_frame, PyGenObject, gi_iframe);
    OFFSET(code_flags, PyCodeObject, co_flags);
    OFFSET(code_arguments, PyCodeObject, co_argcount);
    OFFSET(code_values, PyCodeObject, co_nlocalsplus);
    OFFSET(code_free, PyCodeObject, co_nfreevars);
    OFFSET(code_value_names, PyCodeObject, co_localsplusnames);
    OFFSET(code_filename, PyCodeObject, co_filename);
    OFFSET(code_name, PyCodeObject, co_name);
    OFFSET(type_name, PyTypeObject, tp_name);
    OFFSET(type_basic_size, PyTypeObject, tp_basicsize);
    OFFSET(type_item_size, PyTypeObject, tp_itemsize);
    OFFSET(type_flags, PyTypeObject, tp_flags);
    OFFSET(type_weaklist_offset, PyTypeObject, tp_weaklistoffset);
    OFFSET(type_base, PyTypeObject, tp_base);
    OFFSET(type_dict, PyTypeObject, tp_dict);
    OFFSET(type_dict_offset, PyTypeObject, tp_dictoffset);
    OFFSET(type_bases, PyTypeObject, tp_bases);
    OFFSET(type_mro, PyTypeObject, tp_mro);
    OFFSET(type_qualified_name, PyHeapTypeObject, ht_qualname);
    OFFSET(type_cached_keys, PyHeapTypeObject, ht_cached_keys);
    OFFSET(dict_keys, PyDictObject, ma_keys);
    OFFSET(dict_values, PyDictObject, ma_values);
    NUMBER(dict_size, sizeof(PyDictObject));
    OFFSET(keys_log2_index_bytes, PyDictKeysObject, dk_log2_index_bytes);
    OFFSET(keys_kind, PyDictKeysObject, dk_kind);
    OFFSET(keys_entries, PyDictKeysObject, dk_nentries);
    OFFSET(keys_indices, PyDictKeysObject, dk_indices);
    OFFSET(values_start, PyDictValues, values);
    OFFSET(text_length, PyASCIIObject, length);
    OFFSET(text_state, PyASCIIObject, state);
    NUMBER(text_ascii, sizeof(PyASCIIObject));
    NUMBER(text_other, sizeof(PyCompactUnicodeObject));
    OFFSET(size, PyVarObject, ob_size);
    OFFSET(list_items, PyListObject, ob_item);
    NUMBER(list_size, sizeof(PyListObject));
    OFFSET(tuple_items, PyTupleObject, ob_item);
    OFFSET(set_mask, PySetObject, mask);
    OFFSET(set_table, PySetObject, table);
    NUMBER(set_size, sizeof(PySetObject));
    OFFSET(number_digits, PyLongObject, DIGITS);
    OFFSET(function_globals, PyFunctionObject, func_globals);
    OFFSET(function_qualified_name, PyFunctionObject, func_qualname);
    OFFSET(function_code, PyFunctionObject, func_code);
    OFFSET(function_defaults, PyFunctionObject, func_defaults);
    OFFSET(function_keyword_defaults, PyFunctionObject, func_kwdefaults);
    OFFSET(function_closure, PyFunctionObject, func_closure);
    OFFSET(function_dict, PyFunctionObject, func_dict);
    OFFSET(function_module, PyFunctionObject, func_module);
    OFFSET(function_annotations, PyFunctionObject, func_annotations);
    OFFSET(cell_value, PyCellObject, ob_ref);
    OFFSET(method_function, PyMethodObject, im_func);
    OFFSET(method_self, PyMethodObject, im_self);
    OFFSET(builtin_definition, PyCFunctionObject, m_ml);
    OFFSET(builtin_self, PyCFunctionObject, m_self);
    OFFSET(builtin_module, PyCFunctionObject, m_module);
    OFFSET(weakref_object, PyWeakReference, wr_object);
    OFFSET(weakref_callback, PyWeakReference, wr_callback);
    OFFSET(member_definition, PyMemberDescrObject, d_member);
    OFFSET(definition_offset, PyMemberDef, offset);
    OFFSET(exception_traceback, PyBaseExceptionObject, traceback);
    NUMBER(collector_head, sizeof(PyGC_Head));
    return 0;
}
