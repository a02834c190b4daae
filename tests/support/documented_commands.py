"""How a test runs each command line of the documentation, and why not always as typed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from support.documented_files import Files, environment
from support.documents import ROOT, Command

LIMIT_S: Final = 600


class Unmet(AssertionError):
    """A command line of the documentation does not do what the page says."""


Check = Callable[[Command, Path], None]


@dataclass(frozen=True, slots=True)
class Rule:
    """How command lines are checked that cannot be run as they are typed.

    Attributes:
        pattern: of the lines; matched against the whole line, without its comment.
        why: the reason, for readers of this list.
        check: what is done instead.
        long: only run when long tests are asked for.
        page: on which pages.
    """

    pattern: str
    why: str
    check: Check
    long: bool = False
    page: str = ".*"

    def fits(self, command: Command) -> bool:
        line = re.fullmatch(self.pattern, " ".join(command.words))
        return line is not None and re.fullmatch(self.page, command.page) is not None


def as_typed(command: Command, folder: Path) -> None:
    """Run it in the shell: the status must be 0, and it must print what the page shows, in this order."""
    shell(command, folder, command.text)


def typed_as(pattern: str, replacement: str) -> Check:
    """Run it with a part replaced."""

    def run(command: Command, folder: Path) -> None:
        text, count = re.subn(pattern, replacement, command.text)
        assert count == 1, f"{command}: nothing to replace"
        shell(command, folder, text)

    return run


def shell(command: Command, folder: Path, text: str) -> None:
    """Run a text in bash, in a folder with the files that it names."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", text],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise Unmet(f"{command}\nstatus {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    compare(command, done.stdout)


def compare(command: Command, printed: str) -> None:
    """Check that a command prints what the page shows below it; a line of dots stands for any lines.

    Pages of cases show extracts of their last run's results, often from a GPU: tests/cases compares them.
    """
    if command.page.startswith("cases/"):
        return
    rest = iter([line.rstrip() for line in printed.splitlines()])
    for line in command.shown:
        if line.strip() not in ("", "...") and line.rstrip() not in rest:
            raise Unmet(f"{command}\nshows a line that is not printed there:\n{line}\n\n{printed}")


def make_knows(command: Command, folder: Path) -> None:
    """Check that `make` has the target and can expand every recipe that leads to it."""
    text = ["make", "-n", "-C", str(ROOT), *command.words[1:]]
    done = subprocess.run(text, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise Unmet(f"{command}\n{done.stderr}")


def can_be_installed(command: Command, folder: Path) -> None:
    """Check that what `pip install` is given exists: this project, an extra of it, a file of requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    words = [word for word in command.words[2:] if word not in ("--no-deps", "-e")]
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word == "-r":
            if not any((base / words[at]).is_file() for base in (ROOT, (ROOT / command.page).parent)):
                raise Unmet(f"{command}: no file {words[at]}")
            at += 1
            continue
        match = re.fullmatch(r"(\.|memtriage)(?:\[(.+)\])?", word)
        if match is None:
            raise Unmet(f"{command}: {word} is neither this project nor a file of requirements")
        for extra in (match[2] or "").split(","):
            if extra and extra not in project["optional-dependencies"]:
                raise Unmet(f"{command}: there is no extra {extra}")


def script_takes_it(command: Command, folder: Path) -> None:
    """Check that the script exists and has every option that it is given."""
    words = command.words
    script = next(word for word in words if word.endswith(".py"))
    path = next(
        (base / script for base in (ROOT, (ROOT / command.page).parent) if (base / script).is_file()), None
    )
    if path is None:
        raise Unmet(f"{command}: no file {script}")
    given = {word.split("=")[0] for word in words[words.index(script) + 1 :] if word.startswith("--")}
    missing = given - script_options(path)
    if missing:
        raise Unmet(f"{command}: {script} has no option {', '.join(sorted(missing))}")


def script_options(path: Path) -> set[str]:
    """The options of a script: strings like `--batch` or `batch_size` in it and in the files next to it."""
    texts = {
        node.value
        for file in (*path.parent.glob("*.py"), *path.parent.parent.glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {
        f"--{text.removeprefix('--').replace('_', '-')}"
        for text in texts
        if re.fullmatch(r"[a-z0-9_-]+", text)
    }


def against_a_commit(command: Command, folder: Path) -> None:
    """Run it in a repository with one commit, against that."""
    for git in ("init --quiet", "add .", "-c user.name=a -c user.email=a@b.c commit --quiet -m a"):
        subprocess.run(["git", *git.split()], cwd=folder, check=True)
    typed_as(r"--base \S+", "--base HEAD")(command, folder)


def collects_tests(command: Command, folder: Path) -> None:
    """Check that pytest finds the tests that it is given."""
    given = command.words[command.words.index("pytest") + 1 :]
    text = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *given]
    done = subprocess.run(text, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise Unmet(f"{command}\n{done.stdout}\n{done.stderr}")


RULES: Final = (
    Rule(
        r"make .*",
        "installs, or runs for many minutes: what it would do is read off `make -n`",
        make_knows,
    ),
    Rule(
        r"pip install .*",
        "changes the environment of the tests: what it is given is looked up in pyproject.toml",
        can_be_installed,
    ),
    Rule(
        r"\S*python -m pytest (-m \w+ )?tests/.*",
        "runs tests that run anyway: pytest must find what it is given",
        collects_tests,
    ),
    Rule(
        r"python benchmarks/\S+\.py.*",
        "takes minutes, and most of them a GPU: the script and its options are looked up",
        script_takes_it,
    ),
    Rule(
        r"torchrun --nproc-per-node 8 .*",
        "eight processes that import torch: two do the same",
        typed_as(r"--nproc-per-node 8", "--nproc-per-node 2"),
        long=True,
    ),
    Rule(
        r"memtriage run --(host-tuning|metrics|prime).*|torchrun train\.py .*",
        "one more process that imports torch: what the options do is tested where they are made",
        as_typed,
        long=True,
    ),
    Rule(
        r"accelerate launch .*",
        "Accelerate asks about the machine on its first use unless told: --cpu",
        typed_as(r"accelerate launch", "accelerate launch --cpu"),
        long=True,
    ),
    Rule(
        r"deepspeed --module .*",
        "DeepSpeed's launcher starts nothing where there is no GPU: what it would start is run",
        typed_as(r"deepspeed --module", "python -m"),
        long=True,
    ),
    Rule(
        r"memtriage diff --env .*",
        "the environments are nobody's: both are this one",
        typed_as(r"--env \S+ \S+", f"--env {sys.executable} {sys.executable}"),
    ),
    Rule(
        r"memtriage plan .* --maximize .*",
        "the model of the tests is small: a small budget is full after few traces",
        typed_as(r"--budget \S+", "--budget 1GiB"),
    ),
    Rule(
        r"memtriage gate .*",
        "the folder is no repository: it becomes one, with one commit",
        against_a_commit,
    ),
    Rule(
        r"memtriage compare (examples|cases)/\S+",
        "runs for minutes, some on two GPUs: the trials file is checked, and what would run printed",
        typed_as(r"(\S+\.toml)", r"\1 --dry-run"),
    ),
    Rule(
        r"memtriage run examples/train_gpt2\.py.*",
        "takes two minutes at its own size: the same, small",
        typed_as(r"train_gpt2\.py", "train_gpt2.py --layers 1 --width 64 --vocabulary 512 --steps 9"),
        long=True,
    ),
    Rule(
        r"python cases/fp8_refit/(loop\.py .*--device cpu|simulate\.py).*",
        "a small reinforcement-learning loop, a model of three layers: many seconds",
        as_typed,
        long=True,
    ),
    Rule(
        r"(python|memtriage run.*|torchrun .*) \S*train\.py(?!.* --(library te|memory)).*",
        "a case's own training takes a quarter of a minute; tests/cases looks at what it says",
        as_typed,
        long=True,
        page=r"cases/.+/.*",
    ),
    Rule(
        r"(python|memtriage run.*|torchrun .*) \S+\.py.*",
        "needs GPUs or DeepSpeed, or many minutes; tests/cases runs it small: its options are looked up",
        script_takes_it,
        page=r"cases/.*",
    ),
)


def rule_for(command: Command) -> Rule | None:
    """The first rule that fits; None if the command is run as it is typed."""
    return next((rule for rule in RULES if rule.fits(command)), None)


def typed_in(command: Command) -> Path | None:
    """The case's folder that a command is typed in; None for any other folder.

    A case's page names files next to it, unless it names them from the top of the repository.
    """
    beside = (ROOT / command.page).parent
    in_case = command.page.startswith("cases/") and beside != ROOT / "cases" and "cases/" not in command.text
    return beside if in_case else None


def prepare(command: Command, folder: Path, files: Files) -> None:
    """Put the files that a command names into a folder."""
    beside = typed_in(command)
    if beside is None:
        files.bring(folder, " ".join(command.words))
        return
    for path in beside.iterdir():
        (folder / path.name).symlink_to(path)
