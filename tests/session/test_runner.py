"""A program run by `execute` against the same program run by python: nothing that it sees may differ."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

DRIVER = """
import sys
from memtriage.session.runner import ScriptTarget, execute, finish
kind, name, *args = sys.argv[1:]
outcome = execute(ScriptTarget(kind, name, args))
outcome.release()
sys.exit(finish(outcome))
"""

BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
"""Without it, the order of output and error output would be the same whoever flushes when."""


def _run(
    command: list[str], directory: Path, *, merge: bool = False, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merge else subprocess.PIPE,
        text=True,
        env=BUFFERED | (env or {}),
        timeout=60,
    )


def assert_same(
    directory: Path,
    kind: str,
    *words: str,
    flags: tuple[str, ...] = (),
    merge: bool = False,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs both ways; returns the watched run after comparing output, error output and exit status."""
    how = ["-m"] if kind == "module" else []
    unwatched = _run([sys.executable, *flags, *how, *words], directory, merge=merge, env=env)
    watched = _run([sys.executable, *flags, "-c", DRIVER, kind, *words], directory, merge=merge, env=env)
    assert watched.stdout == unwatched.stdout
    assert watched.stderr == unwatched.stderr
    assert watched.returncode == unwatched.returncode
    return watched


def write(directory: Path, name: str, source: str) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


WORLD = """
    import sys, __main__
    print(list(globals()))
    for name in ("__name__", "__doc__", "__package__", "__file__", "__cached__", "__builtins__"):
        print(name, globals().get(name, "missing"))
    print(type(__loader__), __loader__.name, __loader__.path)
    print(__spec__ and (__spec__.name, __spec__.origin, __spec__.parent, __spec__.cached))
    print(sys.argv, sys.path, sys.flags, __main__.__dict__ is globals())
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with the same prying program as script, module, package, directory, zip and link."""
    write(tmp_path, "train.py", WORLD)
    write(tmp_path, "package/__init__.py", "import sys; print('package', sys.argv)")
    write(tmp_path, "package/__main__.py", WORLD)
    write(tmp_path, "package/inner.py", WORLD)
    (tmp_path / "package/link.py").symlink_to("../train.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", textwrap.dedent(WORLD))
    return tmp_path


@pytest.mark.parametrize(
    "name", ["train.py", "./package/../train.py", "package/link.py", "package", "./app.zip"]
)
@pytest.mark.parametrize("flags", [(), ("-P",), ("-O", "-W", "error")])
def test_script_sees_the_same_world(project: Path, name: str, flags: tuple[str, ...]) -> None:
    assert_same(project, "script", name, "--json", "a b", flags=flags)


@pytest.mark.parametrize("name", ["train", "package", "package.inner"])
def test_module_sees_the_same_world(project: Path, name: str) -> None:
    assert_same(project, "module", name, "--json", "a b")


def test_module_under_safe_path(project: Path) -> None:
    path = os.pathsep.join([str(project), os.environ.get("PYTHONPATH", "")])
    assert_same(project, "module", "package", flags=("-P",), env={"PYTHONPATH": path})


def test_script_by_absolute_path(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert_same(tmp_path_factory.mktemp("elsewhere"), "script", str(project / "train.py"))


def test_compiled_script(tmp_path: Path) -> None:
    source = write(tmp_path, "train.py", WORLD)
    program = f"import py_compile; py_compile.compile({str(source)!r}, 'train.pyc', dfile='train.py')"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
    assert_same(tmp_path, "script", "train.pyc")


ENDS = {
    "falls off the end": "print('done')",
    "status": "import sys; sys.exit(3)",
    "none": "import sys; sys.exit()",
    "true": "import sys; sys.exit(True)",
    "negative": "import sys; sys.exit(-1)",
    "beyond a byte": "import sys; sys.exit(256 + 5)",
    "the largest": "import sys; sys.exit(2**63 - 1 - 250)",
    "the smallest": "import sys; sys.exit(-2**63 + 5)",
    "text": "import sys; print('out', end=''); sys.exit('gone: \\u00e4')",
    "object": "import sys; sys.exit((1, 'two'))",
    "text without stderr": "import sys; sys.stderr = None; sys.exit('nowhere')",
    "raise SystemExit": "raise SystemExit",
    "exception": "print('out', end='')\ndef f(n):\n    return 1 / n\nf(0)",
    "context": "try:\n    {}['a']\nfinally:\n    open('missing')",
    "group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "syntax error": "def f(:\n",
    "own hook": "import sys; sys.excepthook = lambda *a: print('hook', a[0], a[2].tb_lineno)\n1 / 0",
    "hook that fails": "import sys\ndef hook(*a): raise KeyError('h')\nsys.excepthook = hook\n1 / 0",
    "hook that exits": "import sys; sys.excepthook = lambda *a: sys.exit(9)\n1 / 0",
    "no hook": "import sys; del sys.excepthook\n1 / 0",
    "interrupt": "raise KeyboardInterrupt('stop')",
    "subclass of interrupt": "class Stop(KeyboardInterrupt): pass\nraise Stop",
    "hook on interrupt": "import sys; sys.excepthook = lambda *a: sys.exit(9)\nraise KeyboardInterrupt",
    "exit handlers": "import atexit; atexit.register(print, 'handler')\nraise KeyboardInterrupt",
    "thread": (
        "import threading\n"
        "def late():\n    threading.main_thread().join(); print(__name__)\n"
        "threading.Thread(target=late).start()\n1 / 0"
    ),
    "os._exit": "import os; os._exit(4)",
    "abort": "import os; os.kill(os.getpid(), 6)",
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["script", "module"])
def test_same_end(tmp_path: Path, kind: str, end: str) -> None:
    (tmp_path / "train.py").write_text(ENDS[end], encoding="utf-8")
    assert_same(tmp_path, kind, "train.py" if kind == "script" else "train")


@pytest.mark.parametrize("source", [b"x = 1\0", b"# coding: nonsense\n", b"x = '\xff'"])
def test_file_that_is_not_text(tmp_path: Path, source: bytes) -> None:
    """The wording is another: python reads from a file here, and `compile` from memory."""
    (tmp_path / "train.py").write_bytes(source)
    unwatched = _run([sys.executable, "train.py"], tmp_path)
    watched = _run([sys.executable, "-c", DRIVER, "script", "train.py"], tmp_path)
    assert "SyntaxError: " in watched.stderr and "runner.py" not in watched.stderr
    assert watched.returncode == unwatched.returncode == 1


def test_status_beyond_a_long(tmp_path: Path) -> None:
    """Python 3.12 and 3.13 let an OverflowError of their own through to stderr; the status is the same."""
    write(tmp_path, "train.py", "import sys; sys.exit(2 ** 70)")
    unwatched = _run([sys.executable, "train.py"], tmp_path)
    watched = _run([sys.executable, "-c", DRIVER, "script", "train.py"], tmp_path)
    assert watched.returncode == unwatched.returncode == 255


@pytest.mark.parametrize("end", ["1 / 0", "raise SystemExit('last')"])
@pytest.mark.parametrize("kind", ["script", "module"])
def test_same_order_of_output_and_error_output(tmp_path: Path, kind: str, end: str) -> None:
    """In one pipe. A script's output is flushed before its end is printed, a module's is not."""
    write(tmp_path, "train.py", f"print('first', end=''); {end}")
    watched = assert_same(tmp_path, kind, "train.py" if kind == "script" else "train", merge=True)
    assert watched.stdout.startswith("first") or kind == "module"


@pytest.mark.parametrize("name", ["no_such_module_at_all", "package.missing", "os.path", "package.empty"])
def test_module_that_cannot_run(project: Path, name: str) -> None:
    write(project, "package/empty/__init__.py", "")
    assert_same(project, "module", name)


def test_exception_while_the_package_is_imported(tmp_path: Path) -> None:
    write(tmp_path, "package/__init__.py", "raise ValueError('early')")
    write(tmp_path, "package/__main__.py", "")
    assert_same(tmp_path, "module", "package")


CHILDREN = """
    import multiprocessing as mp, os, sys

    class Item:
        def __init__(self, value): self.value = value

    def work(item, queue):
        import __main__
        queue.put((item.value, __name__, type(item).__module__, sys.argv, "memtriage" in sys.modules))

    if __name__ == "__main__":
        for method in ("spawn", "forkserver", "fork"):
            context = mp.get_context(method)
            queue = context.SimpleQueue()
            child = context.Process(target=work, args=(Item(method), queue))
            child.start()
            seen = queue.get()
            child.join()
            print(seen[:4], seen[4] if method != "fork" else None, child.exitcode)
"""


@pytest.mark.parametrize("kind", ["script", "module"])
def test_children_of_multiprocessing(tmp_path: Path, kind: str) -> None:
    write(tmp_path, "train.py", CHILDREN)
    watched = assert_same(tmp_path, kind, "train.py" if kind == "script" else "train")
    spawn, forkserver, fork = watched.stdout.splitlines()
    assert "'__mp_main__'" in spawn and "False 0" in spawn
    assert "'__mp_main__'" in forkserver and "False 0" in forkserver
    assert "'__main__'" in fork


def test_introspection_of_main(tmp_path: Path) -> None:
    write(
        tmp_path,
        "train.py",
        """
        from __future__ import annotations
        import dataclasses, inspect, linecache, pickle, typing

        @dataclasses.dataclass
        class Batch:
            size: int
            other: Batch | None = None

        print(pickle.loads(pickle.dumps(Batch(3, Batch(4)))), Batch.__module__)
        print(typing.get_type_hints(Batch))
        print(inspect.getsource(Batch), inspect.getsourcefile(Batch), inspect.getmodule(Batch).__name__)
        print(linecache.getline(__file__, 3))
        x: int = 1
        print(__annotations__)
        """,
    )
    assert_same(tmp_path, "script", "train.py")


def test_future_imports_of_the_runner_do_not_leak(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "def f(a: 1 + 1): ...\nprint(f.__annotations__)")
    assert assert_same(tmp_path, "script", "train.py").stdout == "{'a': 2}\n"


def executed(then: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs `then` with the `outcome` of train.py."""
    program = """
        from memtriage.session.runner import ScriptTarget, execute
        outcome = execute(ScriptTarget("script", "train.py"))
    """
    return _run([sys.executable, "-c", textwrap.dedent(program) + textwrap.dedent(then)], directory)


def test_outcome_keeps_the_namespace_until_release(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "kept = object()\nraise ValueError('boom')")
    program = """
        import sys, traceback
        frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(outcome.exception.__traceback__)]
        print(outcome.exit_code, repr(outcome.exception), "kept" in outcome.namespace, len(frames))
        print(outcome.namespace is sys.modules["__main__"].__dict__, outcome.exception is sys.last_value)
        print(outcome.in_forked_child)
        outcome.release()
        print(outcome.exception, outcome.namespace)
    """
    done = executed(program, tmp_path)
    assert done.stdout.splitlines() == ["1 ValueError('boom') True 1", "True True", "False", "None {}"]


def test_nothing_of_the_runner_holds_what_the_script_let_go(tmp_path: Path) -> None:
    write(
        tmp_path,
        "train.py",
        """
        import sys, weakref
        class Big: pass
        def step(big): raise ValueError
        big = Big()
        gone = weakref.ref(big)
        step(big)
        """,
    )
    program = """
        import sys
        gone = outcome.namespace["gone"]
        outcome.namespace.clear()
        print(gone() is not None)
        outcome.release()
        del sys.last_value, sys.last_traceback, sys.last_type
        if sys.version_info >= (3, 12):
            del sys.last_exc
        print(gone())
    """
    done = executed(program, tmp_path)
    assert done.stdout.splitlines() == ["True", "None"]


def test_forked_child_that_reaches_the_end_is_told(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "import os\nif (child := os.fork()): os.waitpid(child, 0)")
    program = """
        import os
        os.write(1, b"child " if outcome.in_forked_child else b"parent")
    """
    done = executed(program, tmp_path)
    assert done.stdout == "child parent"
