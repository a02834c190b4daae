"""Run the user's program inside this process as `__main__`, as the interpreter would run it.

What the program sees is what `python SCRIPT`, `python DIR` or `python -m MODULE` shows it: `sys.argv`,
`sys.path[0]`, `__file__`, `__spec__`, its own `__main__` module (so that pickling, `inspect.getsource` and
the children of `multiprocessing` find it), its traceback and its exit status.

Not the same as unwatched: memtriage's frames are below the program's (`traceback.print_stack` and a
`stacklevel` that reaches past the outermost frame show it), `sys.orig_argv` names memtriage, modules that
memtriage needs are imported already (unless the script's folder has one of that name), and a file that is not
text (null bytes, bytes of another encoding) raises the same `SyntaxError` with another message.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import types
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast

from memtriage.observe.exceptions import remove_own_frames, traceback_of
from memtriage.session.depth import RecursionRoom

_UNCAUGHT_STATUS = 1
_INTERRUPTED_STATUS = 130  # 128 + SIGINT, what a shell says of a process that SIGINT killed
_C_LONG_BITS = 64


@dataclass(frozen=True, slots=True)
class ScriptTarget:
    """What to run.

    Attributes:
        kind: `script` (a Python file, or a directory or zip file with a `__main__.py`) or `module` (`-m`).
        name: path of the script as it was given, or dotted name of the module.
        args: the program's own arguments, without its name.
    """

    kind: Literal["script", "module"]
    name: str
    args: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ProgramEnd:
    """How the program ended.

    Attributes:
        exit_code: the status that the operating system would see, 0 to 255; 130 when `interrupted`.
        exception: what ended the program; None if it ran to its end or raised `SystemExit`.
        namespace: the globals of its `__main__`, alive at least until `release`.
        interrupted: ended by `KeyboardInterrupt`, after which `finish` lets the process die of SIGINT.
        pid: the process that called `execute`. A child that the program forked also returns from `execute` if
            it reaches the end of the program: see `in_forked_child`.
    """

    exit_code: int = 0
    exception: BaseException | None = None
    namespace: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    pid: int = field(default_factory=os.getpid)

    @property
    def in_forked_child(self) -> bool:
        """Whether this is a forked child of the watched process, which must exit without a report."""
        return os.getpid() != self.pid

    def release(self) -> None:
        """Release the exception and the namespace.

        Then only what holds them in an unwatched process holds them: `sys.modules["__main__"]`, and after an
        uncaught exception `sys.last_value`.
        """
        self.exception = None
        self.namespace = {}


def execute(target: ScriptTarget, outcome: ProgramEnd | None = None) -> ProgramEnd:
    """Run the program to its end and print what the interpreter would print about that end.

    Args:
        target: what to run.
        outcome: takes the end; its exception is set as soon as the program has ended, before it is printed.

    Changes `sys.argv`, `sys.path[0]` and `sys.modules["__main__"]` for good: exit handlers and threads of
    the program that outlive this call need them. Call it in the main thread and outside any `except` block (a
    handled exception would become the context of the program's own).

    An uncaught exception is printed through `sys.excepthook` without memtriage's frames and left in
    `sys.last_value`, as the interpreter does. This call never raises what the program raises.
    """
    outcome = outcome or ProgramEnd()
    outcome.namespace = _install_main().__dict__
    room = RecursionRoom()
    _run(target, room, outcome)
    try:
        _conclude(outcome)
    except KeyboardInterrupt:  # another one, while the first is printed
        outcome.exit_code, outcome.interrupted = _INTERRUPTED_STATUS, True
    room.remove()
    return outcome


def finish(outcome: ProgramEnd) -> int:
    """Return the status to exit with; does not return if Ctrl-C ended the program. Call it last.

    Raises:
        KeyboardInterrupt: the program ended with it. Let it reach the top of the process: the
            interpreter then joins threads, runs exit handlers and kills itself by SIGINT, as it does
            unwatched. Its traceback is not printed a second time.
    """
    if outcome.interrupted:
        _raise_printed_interrupt()
    return outcome.exit_code


def program_folder(target: ScriptTarget) -> str | None:
    """Return the folder where the program's imports are looked up first; None if it is not the program's."""
    if sys.flags.safe_path:
        return None
    if target.kind == "module":
        return _current_folder() or None
    path = absolute(target.name)
    return path if pkgutil.get_importer(path) is not None else os.path.dirname(os.path.realpath(path))


def absolute(name: str) -> str:
    """Return a script's absolute path as the interpreter makes it: not normalized."""
    return name if os.path.isabs(name) else os.path.join(_current_folder(), name)


def _current_folder() -> str:
    """Return the current directory; empty if it was removed, as in the interpreter."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _install_main() -> types.ModuleType:
    """Make an empty module `__main__`, with the names that the interpreter gives it."""
    main = types.ModuleType("__main__")
    namespace = main.__dict__
    if sys.version_info < (3, 14):
        namespace["__annotations__"] = {}
    namespace["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def _run(target: ScriptTarget, room: RecursionRoom, outcome: ProgramEnd) -> None:
    """Run the program and keep what it raised, so that the caller handles no exception meanwhile."""
    try:
        if target.kind == "module":
            _run_module(target, room)
        else:
            _run_script(target, room)
    except BaseException as error:
        # The top of the program: any exception that gets here would have ended the interpreter.
        outcome.exception = error


def _run_module(target: ScriptTarget, room: RecursionRoom) -> None:
    sys.argv[:] = ["-m", *target.args]
    if not sys.flags.safe_path:
        _replace_launcher_path(_current_folder())
    room.make(by_exec=False)
    # The function that the interpreter calls for -m. It fills in sys.modules["__main__"].
    runpy._run_module_as_main(target.name, alter_argv=True)  # type: ignore[attr-defined]


def _run_script(target: ScriptTarget, room: RecursionRoom) -> None:
    sys.argv[:] = [target.name, *target.args]
    # As config_run_filename_abspath in Python/initconfig.c.
    path = absolute(target.name)
    if pkgutil.get_importer(path) is not None:
        _run_location(path, room)
        return
    if not sys.flags.safe_path:
        _replace_launcher_path(os.path.dirname(os.path.realpath(path)))
    _run_file(path, sys.modules["__main__"], room)


def _run_location(path: str, room: RecursionRoom) -> None:
    """Run the `__main__` of a directory or zip file, which goes into `sys.path` even under -P."""
    if sys.flags.safe_path:
        sys.path.insert(0, path)
    else:
        _replace_launcher_path(path)
    room.make(by_exec=False)
    runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]


def _run_file(path: str, main: types.ModuleType, room: RecursionRoom) -> None:
    try:
        with io.open_code(path) as stream:
            content = stream.read()
        code, main.__loader__ = _compile_main(path, content)
        main.__file__ = path
        if sys.version_info < (3, 15):
            main.__dict__["__cached__"] = None
        room.make(by_exec=True)
        exec(code, main.__dict__)
    finally:
        # As pyrun_file in Python/pythonrun.c: what the script printed comes before its traceback.
        _flush_streams()


def _compile_main(path: str, content: bytes) -> tuple[types.CodeType, Any]:
    """Code and loader of a source file, or of a compiled one, recognized by its magic number."""
    compiled: types.CodeType | None = pkgutil.read_code(io.BytesIO(content))
    if compiled is not None:
        return compiled, importlib.machinery.SourcelessFileLoader("__main__", path)
    # dont_inherit: the `from __future__` imports of this file are not the script's.
    source = compile(content, path, "exec", dont_inherit=True)
    return source, importlib.machinery.SourceFileLoader("__main__", path)


def _replace_launcher_path(entry: str) -> None:
    """Put the program's directory where the interpreter had put memtriage's."""
    sys.path[:1] = [entry]


def _conclude(outcome: ProgramEnd) -> None:
    """Print what the interpreter would print about the end, and set the exit status."""
    error = outcome.exception
    # By its type, as the interpreter: `isinstance` asks the exception for its `__class__`, too.
    if issubclass(type(error), SystemExit):
        outcome.exception = None
        outcome.exit_code = _exit_status(cast(SystemExit, error))
    elif error is not None:
        remove_own_frames(error)
        hook_status = _print_uncaught(error)
        # The class itself: CPython's run_eval_code_obj treats a subclass as an error like any other.
        outcome.interrupted = hook_status is None and type(error) is KeyboardInterrupt
        usual_status = _INTERRUPTED_STATUS if outcome.interrupted else _UNCAUGHT_STATUS
        outcome.exit_code = usual_status if hook_status is None else hook_status


def _flush_streams() -> None:
    for stream in (sys.stderr, sys.stdout):
        # The interpreter also ignores what a closed or replaced stream does here.
        with suppress(Exception):
            stream.flush()


def _exit_status(request: SystemExit) -> int:
    """Status of a `SystemExit`, and its text on stderr when it has one: handle_system_exit in C."""
    code: Any = request.code
    if code is None:
        return 0
    if issubclass(type(code), int):
        number = int.__int__(code)
        fits = -(1 << (_C_LONG_BITS - 1)) <= number < 1 << (_C_LONG_BITS - 1)
        return number & 0xFF if fits else 0xFF
    _print_to_stderr(code)
    return _UNCAUGHT_STATUS


def _print_to_stderr(text: object) -> None:
    stream = getattr(sys, "stderr", None) or sys.__stderr__
    if stream is not None:
        # If the text cannot be made or written, the exit status is the same.
        with suppress(Exception):
            print(text, file=stream)


def _print_uncaught(error: BaseException) -> int | None:
    """Do what PyErr_Print does. Return the status to exit with if `sys.excepthook` raised `SystemExit`."""
    trace = traceback_of(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        _print_to_stderr("sys.excepthook is missing")
        sys.__excepthook__(type(error), error, trace)
        return None
    try:
        hook(type(error), error, trace)
    except SystemExit as request:
        return _exit_status(request)
    except BaseException as hook_error:
        failure = hook_error
    else:
        return None
    remove_own_frames(failure)
    _print_to_stderr("Error in sys.excepthook:")
    sys.__excepthook__(type(failure), failure, traceback_of(failure))
    _print_to_stderr("\nOriginal exception was:")
    sys.__excepthook__(type(error), error, trace)
    return None


def _raise_printed_interrupt() -> NoReturn:
    """Raise a `KeyboardInterrupt` that ends the process as usual, but is not printed."""
    interrupt = KeyboardInterrupt()
    usual_hook = sys.excepthook

    def print_all_but_interrupt(
        kind: type[BaseException], value: BaseException, trace: types.TracebackType | None
    ) -> None:
        sys.excepthook = usual_hook
        if value is not interrupt:
            usual_hook(kind, value, trace)

    sys.excepthook = print_all_but_interrupt
    raise interrupt
