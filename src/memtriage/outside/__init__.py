"""A census of a process that was not prepared for it, read from outside.

Nothing is written to the process and nothing runs in it: its memory is read with `process_vm_readv`, or from
`/proc/PID/mem` where an ancestor of it has opened that. Only the
structure of its heap is interpreted: types, names, references and sizes, never the values of its variables.
"""
