"""`memtriage run`: run a training script and watch its memory."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from memtriage.process.messages import complain
from memtriage.session.runner import ScriptTarget

if TYPE_CHECKING:
    from memtriage.model.findings import Verdict
    from memtriage.report.monitoring.prometheus import Address
from memtriage.store.layout import DEFAULT_DIRECTORY, DIRECTORY_VARIABLE

SUMMARY: Final = "Run a training script and report what keeps its memory."

HELP: Final = f"""\
Usage: memtriage run [OPTIONS] SCRIPT [ARGS...]
       memtriage run [OPTIONS] -m MODULE [ARGS...]
       torchrun [...] -m memtriage run [OPTIONS] SCRIPT [ARGS...]

  {SUMMARY}

  The script runs as it does under python, and memtriage exits with its exit
  status. The report goes to stderr.

Options (before SCRIPT; arguments after SCRIPT or MODULE go to the script):
  -o, --output DIR  Write the record to DIR
                    [default: $MEMTRIAGE_DIR, else ./memtriage-run].
  --json FILE       Also write the report to FILE, as JSON.
  --fail-on VERDICT[,VERDICT...]
                    Exit with 3 if the script succeeds and the verdict is one
                    of: clean, leak, residue, fragmentation, out_of_memory,
                    not_judged, error.
  --per-microbatch  Print the memory in use after every micro-batch, on stderr.
  --metrics [HOST:]PORT
                    Serve Prometheus metrics, on this machine unless HOST is
                    given. Each rank listens at PORT plus its local rank.
  --listen          Answer `memtriage census --pid N` while the script runs.
  --prime           Predict first, then restart once with blocks that lower
                    reserved GPU memory.
  --host-tuning     Restart once with malloc settings that return freed host
                    memory to the system.
  -m MODULE         Run a module, as python -m does.
  -h, --help        Show this message and exit.

Examples:
  memtriage run train.py --batch 8
  memtriage run -m package.train --batch 8
  memtriage run --fail-on leak,residue train.py
  torchrun --nproc-per-node 8 -m memtriage run train.py
"""

USAGE_STATUS = 2
"""Exit status of bad usage and of input that cannot be read."""


_FLAGS = ("--host-tuning", "--per-microbatch", "--listen", "--prime")
_LOCAL_RANK = re.compile(r"--local[_-]rank(=.*)?", re.DOTALL)
_INTERPRETER = re.compile(r"python(\d+(\.\d+)?)?")
_VALUES = {"-o": "a directory", "--json": "a file", "--metrics": "[HOST:]PORT", "--fail-on": "verdicts"}
_EXPECTED = "expected [-o DIR] [--json FILE] and then SCRIPT or -m MODULE"


class UsageError(ValueError):
    """The command line, or what it names, cannot be used. The text is one line for the user."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """A parsed command line: options as they were given, None or False without them.

    Attributes:
        target: what to run; None when help was asked for.
        directory: of `-o`.
        json_path: of `--json`.
    """

    target: ScriptTarget | None
    directory: Path | None = None
    json_path: Path | None = None
    host_tuning: bool = False
    prime: bool = False
    per_microbatch: bool = False
    metrics: str | None = None
    listen: bool = False
    fail_on: str | None = None


def main(argv: list[str]) -> int:
    """Run `memtriage run` and return the status to exit with: the script's, or 2 on bad usage.

    Where the script succeeded and `--fail-on` lists the verdict, it is 3.

    Args:
        argv: see `parse`.

    Raises:
        KeyboardInterrupt: when Ctrl-C ended the script, so that the process dies as it would unwatched.
    """
    try:
        options = parse(argv)
        if options.target is None:
            print(HELP, end="")
            return 0
        check_target(options.target)
        directory = _output_directory(options.directory)
        json_path = _output_file(options.json_path)
        metrics = _metrics_address(options.metrics)
        fail_on = _verdicts(options.fail_on)
    except UsageError as error:
        complain("memtriage run", error)
        return USAGE_STATUS
    if options.host_tuning:
        from memtriage.treat.host_tuning import restart_tuned

        restart_tuned()
    before_program = None
    if options.prime:
        from memtriage.cli.primed import choice_in_environment, restart_primed

        priming = choice_in_environment()
        if priming is None:
            restart_primed(options.target)
        else:
            from memtriage.treat.priming import begin_primed

            before_program = partial(begin_primed, priming)
    # Imported late: a mistyped command line should not wait for the watch to load.
    from memtriage.session.run import run_watched

    return run_watched(
        options.target,
        directory,
        json_path,
        per_microbatch=options.per_microbatch,
        metrics=metrics,
        listen=options.listen,
        fail_on=fail_on,
        before_program=before_program,
    )


def is_run(argv: Sequence[str]) -> bool:
    """Whether this command line is one of `run`, which a launcher may have put its own option before."""
    _, rest = _split_launcher_options(argv)
    return rest[:1] == ["run"]


def parse(argv: Sequence[str]) -> RunOptions:
    """Parse what follows `memtriage` on the command line; look at no file and at no environment.

    Launchers that pass the rank as an option put it after the first name that they see, which is
    `memtriage`: `python -m memtriage --local_rank=0 run train.py a`. It is handed on to the script, in front
    of its arguments, where the launcher would have put it.

    Args:
        argv: the arguments; the word `run` may be missing.

    Raises:
        UsageError: an option that is unknown or lacks its value, or nothing to run.
    """
    launcher, rest = _split_launcher_options(argv)
    if rest[:1] == ["run"]:
        del rest[0]
    values: dict[str, str] = {}
    flags: set[str] = set()
    while rest and _is_own_option(rest[0]):
        word = rest.pop(0)
        if word in ("-h", "--help"):
            return RunOptions(target=None)
        if word in _FLAGS:
            flags.add(word)
            continue
        name, value = _option(word, rest)
        values[name] = value
    target = _target(rest)
    return RunOptions(
        ScriptTarget(target.kind, target.name, [*launcher, *target.args]),
        directory=Path(values["-o"]) if "-o" in values else None,
        json_path=Path(values["--json"]) if "--json" in values else None,
        host_tuning="--host-tuning" in flags,
        prime="--prime" in flags,
        per_microbatch="--per-microbatch" in flags,
        metrics=values.get("--metrics"),
        listen="--listen" in flags,
        fail_on=values.get("--fail-on"),
    )


def check_target(target: ScriptTarget) -> None:
    """Check that there is something to run, before anything of it runs.

    A module is looked for by the first part of its name only, because finding more would import its package.

    Raises:
        UsageError: no such script or module, a directory without `__main__.py`, a file that can't be read.
    """
    if target.kind == "module":
        _check_module(target.name)
    else:
        _check_script(target.name)


def _split_launcher_options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's leading `--local_rank=N` or `--local-rank N`, and what follows."""
    count = 0
    while count < len(argv):
        match = _LOCAL_RANK.fullmatch(argv[count])
        if match is None:
            break
        count += 1 if match[1] else 2
    return list(argv[:count]), list(argv[count:])


def _is_own_option(word: str) -> bool:
    return word.startswith("-") and word not in ("-", "--") and not word.startswith("-m")


def _option(word: str, rest: list[str]) -> tuple[str, str]:
    """Name (one of `_VALUES`) and value of an option, whose value may be taken from `rest`."""
    name, has_value, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
    name = "-o" if name == "--output" else name
    if name not in _VALUES:
        raise UsageError(
            f"unknown option {word!r}{_similar(word)}; {_EXPECTED}: options of the script go after it"
        )
    if not has_value and rest:
        value = rest.pop(0)
    if not value:
        expected = f"expected {_VALUES[name]} after it, then SCRIPT or -m MODULE"
        raise UsageError(f"missing value of {word!r}; {expected}")
    return name, value


def _similar(word: str) -> str:
    """Return a question that names the option most like a mistyped one; empty if none is."""
    from difflib import get_close_matches

    known = [*_FLAGS, "--output", *(name for name in _VALUES if name.startswith("--"))]
    close = get_close_matches(word.partition("=")[0], known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _target(words: list[str]) -> ScriptTarget:
    """Return what to run, from the command line after memtriage's own options, and after `--`."""
    if words[:1] == ["--"]:
        return _script(words[1:])
    if words and words[0].startswith("-m"):
        return _module(words)
    return _script(words)


def _script(words: list[str]) -> ScriptTarget:
    if not words:
        raise UsageError(f"nothing to run; {_EXPECTED}: give the script as in `memtriage run train.py`")
    return ScriptTarget("script", words[0], words[1:])


def _module(words: list[str]) -> ScriptTarget:
    """The target of `-m NAME ARGS` or `-mNAME ARGS`."""
    attached = words[0][2:]
    name, *args = [attached, *words[1:]] if attached else words[1:] or [""]
    if not name:
        raise UsageError("missing value of '-m'; expected the name of a module, as in `-m package.train`")
    return ScriptTarget("module", name, args)


def _check_script(name: str) -> None:
    if not os.path.exists(name):
        raise UsageError(f"no such script: {name!r}; expected a Python file{_hint(name)}")
    if os.path.isdir(name) and not any(
        os.path.isfile(os.path.join(name, f"__main__.{ending}")) for ending in ("py", "pyc")
    ):
        raise UsageError(
            f"{name!r} is a directory without __main__.py; expected a Python file: name the script in it"
        )
    if not os.access(name, os.R_OK):
        raise UsageError(f"cannot read {name!r}; expected a readable Python file: check its permissions")


def _hint(name: str) -> str:
    if _INTERPRETER.fullmatch(os.path.basename(name)):
        return ": leave out the interpreter, as in `memtriage run train.py`"
    return f" below {_absolute(Path())}: check the path, or give a module with -m"


def _check_module(name: str) -> None:
    first = name.partition(".")[0]
    if not first or first in sys.modules or importlib.util.find_spec(first):
        return
    # The directory that -m searches first is not in sys.path yet.
    if not sys.flags.safe_path and importlib.machinery.PathFinder.find_spec(first, [str(_absolute(Path()))]):
        return
    raise UsageError(
        f"no module named {first!r}; expected one that this interpreter can import: check the name, start "
        f"in the directory that contains it, or install it for {sys.executable}"
    )


def _output_directory(given: Path | None) -> Path:
    """Absolute, because the script may change the current directory. Not made yet."""
    directory = given or Path(os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY)
    if os.path.exists(directory) and not os.path.isdir(directory):
        raise UsageError(
            f"{str(directory)!r} is a file; expected a directory for the record: give one with -o"
        )
    return _absolute(directory)


def _output_file(given: Path | None) -> Path | None:
    """Absolute, and writable as far as can be told before the run, which would be lost at its end."""
    if given is None:
        return None
    if os.path.isdir(given):
        raise UsageError(f"--json {str(given)!r} is a directory; expected a file: name one in it")
    if not os.path.isdir(_absolute(given).parent):
        raise UsageError(
            f"--json {str(given)!r} is in a directory that does not exist; expected one that does: make it"
        )
    return _absolute(given)


def _absolute(path: Path) -> Path:
    """An absolute path; a relative one stays so where the current directory was removed."""
    try:
        return path.absolute()
    except OSError:
        return path


def _metrics_address(given: str | None) -> Address | None:
    if given is None:
        return None
    from memtriage.report.monitoring.prometheus import parse_address

    try:
        return parse_address(given)
    except ValueError as error:
        raise UsageError(f"--metrics: {error}") from None


def _verdicts(given: str | None) -> frozenset[Verdict]:
    if given is None:
        return frozenset()
    from memtriage.model.findings import VERDICTS_OF_A_RUN

    names = [name.strip() for name in given.split(",")]
    unknown = next((name for name in names if name not in VERDICTS_OF_A_RUN), None)
    if unknown is not None:
        raise UsageError(
            f"invalid --fail-on {unknown!r}; expected one or more of {','.join(VERDICTS_OF_A_RUN)}"
        )
    return frozenset(word for word in VERDICTS_OF_A_RUN if word in names)
