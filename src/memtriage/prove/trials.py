"""The trials file: what runs, under which variants, how often, and which targets are to be met."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from memtriage.prove.limits import METRICS, Dimension, Limit, parse_limit
from memtriage.prove.table import Table, TrialsError

REPEATS: Final = 5
"""Default number of processes a variant: the fewest whose lowest and highest enclose the median with a
confidence above 90 % (1 - 2 x 0.5^5 = 94 %)."""
WARMUP: Final = 4
"""Default number of steps left out: the first make optimizer state and compile."""
GIVE_UP_AFTER: Final = 2
"""Default number of failures in a row after which a variant is not tried again."""
STEP_MARK: Final = "step"

_TRIALS_KEYS: Final = (
    *("name", "script", "module", "args", "env", "allocator", "python", "directory", "memtriage"),
    *("ranks", "repeats", "warmup", "timeout", "mark", "step", "baseline", "give_up_after"),
)
_VARIANT_KEYS: Final = ("name", "args", "env", "allocator", "memtriage")
_POLICY_KEYS: Final = ("phase", "host_tuning")
_RAY_KEYS: Final = ("address", "gpus", "cpus")
_LONGEST_NAME: Final = 60
_VALUE_NAME: Final = re.compile(r"[A-Za-z_]\w*")

Sense = Literal["at_most", "at_least", "equals"]
_SENSES: Final[tuple[Sense, ...]] = ("at_most", "at_least", "equals")
_TARGET_KEYS: Final = ("metric", "variant", *_SENSES)


@dataclass(frozen=True, slots=True)
class VariantPolicy:
    """What memtriage itself does in a variant.

    Attributes:
        phase: whether `memtriage.phase` acts at the end of a phase; None leaves it to the script.
        host_tuning: run with malloc's settings, as `memtriage run --host-tuning`.
    """

    phase: bool | None = None
    host_tuning: bool = False


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the job.

    Attributes:
        name: as in the table.
        args: the script's arguments, the common ones first.
        env: variables to set; None for one that is to be absent.
        allocator: settings of the CUDA caching allocator, empty for its defaults; None leaves what the
            environment says.
        policy: what memtriage does.
    """

    name: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    allocator: str | None = None
    policy: VariantPolicy = field(default_factory=VariantPolicy)


@dataclass(frozen=True, slots=True)
class Target:
    """A demand on a metric of a variant.

    Attributes:
        metric: one of `limits.METRICS`, or a value read from the output.
        variant: whose.
        sense: `equals` compares a value's whole course with that of the variant in `equals`.
        limit: of `at_most` and `at_least`.
        equals: name of a variant.
    """

    metric: str
    variant: str
    sense: Sense
    limit: Limit | None = None
    equals: str | None = None


@dataclass(frozen=True, slots=True)
class RayOptions:
    """What a trial asks of a Ray cluster.

    Attributes:
        address: of the cluster; None for the one that the environment names, or a new one on this machine.
        gpus: of a trial; None for one a rank where the cluster has any.
        cpus: of a trial; None for one a rank.
    """

    address: str | None = None
    gpus: float | None = None
    cpus: float | None = None


@dataclass(frozen=True, slots=True)
class Trials:
    """A trials file, read and checked.

    Attributes:
        path: the file.
        name: title of the reports.
        script: path of the script, absolute; None where `module` is run.
        module: dotted name.
        python: interpreter; None for the one that runs memtriage.
        directory: where the job starts.
        ranks: processes of a trial; more than one run under torchrun.
        repeats: trials a variant.
        warmup: steps left out at the start of each trial.
        timeout_s: what a trial may take; None for any time.
        mark: mark at which memory is read.
        step: mark that ends a step.
        baseline: name of the variant that the others are compared with.
        give_up_after: failures in a row after which a variant is not tried again.
        variants: at least one; names are unique.
        values: name and expression of each figure that is read from the output.
        targets: one variant each.
        ray: resources of a trial in a cluster.
    """

    path: Path
    name: str
    script: Path | None
    module: str | None
    python: str | None
    directory: Path
    ranks: int
    repeats: int
    warmup: int
    timeout_s: float | None
    mark: str
    step: str
    baseline: str
    give_up_after: int
    variants: tuple[Variant, ...]
    values: Mapping[str, re.Pattern[str]]
    targets: tuple[Target, ...]
    ray: RayOptions

    @property
    def names(self) -> list[str]:
        """Names of the variants."""
        return [variant.name for variant in self.variants]

    @property
    def dimensions(self) -> dict[str, Dimension]:
        """All metrics, with what they are measured in."""
        return _dimensions(self.values)


def read_trials(path: Path) -> Trials:
    """Read and check a trials file. Grammar: docs/compare.md.

    Raises:
        TrialsError: it cannot be read, is no TOML, or says what makes no sense; with the file's name.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise TrialsError(f"{path}: {error.strerror}; expected a trials file: check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TrialsError(f"{path}: no valid TOML ({error}); expected a trials file: correct it") from error
    try:
        return parse_trials(document, path)
    except TrialsError as error:
        raise TrialsError(f"{path}: {error}") from None


def parse_trials(document: Mapping[str, Any], path: Path) -> Trials:
    """Return the trials that a decoded file describes; relative paths in it start at the file's directory.

    Raises:
        TrialsError: something in it makes no sense.
    """
    root = Table(document, "the file", ("trials", "variant", "target", "values", "ray"))
    if "trials" not in root:
        raise TrialsError("there is no table [trials]; expected one that names script or module: add it")
    trials = Table(root.table("trials"), "[trials]", _TRIALS_KEYS)
    base = path.absolute().parent
    script, module = _program(trials, base)
    variants = _variants(root, trials)
    names = [variant.name for variant in variants]
    values = _values(root)
    _refuse_clashes(names, _dimensions(values))
    baseline = trials.text("baseline", names[0])
    if baseline not in names:
        raise trials.wrong("baseline", f"the name of a variant ({', '.join(map(repr, names))})")
    directory = base / trials.text("directory", ".")
    if not directory.is_dir():
        raise trials.wrong("directory", f"a directory that exists, from {base}")
    return Trials(
        path=path,
        name=trials.text("name", path.stem),
        script=script,
        module=module,
        python=trials.text("python") or None,
        directory=directory.resolve(),
        ranks=trials.count("ranks", 1, 1),
        repeats=trials.count("repeats", REPEATS, 1),
        warmup=trials.count("warmup", WARMUP, 1),
        timeout_s=trials.seconds("timeout", None),
        mark=trials.text("mark", trials.text("step", STEP_MARK)),
        step=trials.text("step", STEP_MARK),
        baseline=baseline,
        give_up_after=trials.count("give_up_after", GIVE_UP_AFTER, 1),
        variants=variants,
        values=values,
        targets=tuple(_targets(root, names, values)),
        ray=_ray(root),
    )


def _program(trials: Table, base: Path) -> tuple[Path | None, str | None]:
    script, module = trials.text("script"), trials.text("module")
    if bool(script) == bool(module):
        given = "both" if script else "neither"
        raise TrialsError(f"[trials] names {given} script and module; expected one of them: give one")
    if not script:
        return None, module
    if not (base / script).exists():
        raise trials.wrong("script", f"a Python file, from {base}")
    return (base / script).resolve(), None


def _variants(root: Table, trials: Table) -> tuple[Variant, ...]:
    tables = root.tables("variant")
    if not tables:
        raise TrialsError("there is no [[variant]]; expected at least one, with a name: add it")
    common = _variant(trials, "")
    variants: list[Variant] = []
    for number, each in enumerate(tables, 1):
        table = Table(each, f"[[variant]] {number}", _VARIANT_KEYS)
        name = table.text("name")
        if not name or len(name) > _LONGEST_NAME or "'" in name or not name.isprintable():
            raise table.wrong("name", f'a text of at most {_LONGEST_NAME} characters, without "\'"')
        if name in (other.name for other in variants):
            raise table.wrong("name", "a name that no other variant has")
        own = _variant(table, name)
        variants.append(
            Variant(
                name=name,
                args=common.args + own.args,
                env={**common.env, **own.env},
                allocator=common.allocator if own.allocator is None else own.allocator,
                policy=_policy(table, common.policy),
            )
        )
    return tuple(variants)


def _variant(table: Table, name: str) -> Variant:
    env = _environment(table)
    return Variant(name, table.texts("args"), env, _allocator(table), _policy(table, VariantPolicy()))


def _environment(table: Table) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for key, value in table.table("env").items():
        if value is False:
            found[key] = None
        elif isinstance(value, str | int | float) and value is not True:
            found[key] = str(value)
        else:
            raise table.wrong("env", f"for {key!r} a text, a number, or false for a variable to be absent")
    return found


def _allocator(table: Table) -> str | None:
    if "allocator" not in table:
        return None
    given = table.either("allocator", str, dict)
    if isinstance(given, str):
        return given.strip()
    return ",".join(f"{key}:{value}" for key, value in given.items())


def _policy(table: Table, default: VariantPolicy) -> VariantPolicy:
    policy = Table(table.table("memtriage"), f"{table.where} memtriage", _POLICY_KEYS)
    return VariantPolicy(
        phase=policy.take("phase", bool, False) if "phase" in policy else default.phase,
        host_tuning=policy.take("host_tuning", bool, default.host_tuning),
    )


def _values(root: Table) -> dict[str, re.Pattern[str]]:
    given = root.table("values")
    table = Table(given, "[values]", given)
    found = {}
    for name in given:
        if not _VALUE_NAME.fullmatch(name) or name in METRICS:
            raise TrialsError(
                f"{name!r} in [values] cannot name a value; expected letters, digits and '_', and no "
                f"metric: choose another"
            )
        try:
            pattern = re.compile(table.text(name))
        except re.error as error:
            raise table.wrong(name, f"a regular expression ({error})") from None
        if pattern.groups != 1:
            raise table.wrong(name, "a regular expression with one group, e.g. 'loss ([0-9.]+)'")
        found[name] = pattern
    return found


def _dimensions(values: Mapping[str, object]) -> dict[str, Dimension]:
    return {**METRICS, **dict.fromkeys(values, "number")}


def _refuse_clashes(names: list[str], dimensions: Mapping[str, Dimension]) -> None:
    for name in names:
        if name in dimensions:
            raise TrialsError(f"variant {name!r} is named as a metric; expected another name: change it")


def _targets(root: Table, names: list[str], values: Mapping[str, object]) -> list[Target]:
    found: list[Target] = []
    dimensions = _dimensions(values)
    for number, each in enumerate(root.tables("target"), 1):
        table = Table(each, f"[[target]] {number}", _TARGET_KEYS)
        metric = table.text("metric")
        if metric not in dimensions:
            raise table.wrong("metric", f"one of {', '.join(map(repr, dimensions))}")
        senses = [sense for sense in _SENSES if sense in table]
        if len(senses) != 1:
            raise TrialsError(
                f"[[target]] {number} has {' and '.join(senses) or 'no limit'}; expected one of "
                f"{', '.join(map(repr, _SENSES))}: give one"
            )
        sense = senses[0]
        if sense == "equals":
            found += _equal(table, metric, names, values)
            continue
        text = str(table.either(sense, str, int, float))
        try:
            limit = parse_limit(text, metric, names, dimensions)
        except TrialsError as error:
            raise TrialsError(f"{sense} in [[target]] {number}: {error}") from None
        found += [Target(metric, name, sense, limit) for name in _judged(table, names, limit.variants)]
    return found


def _equal(table: Table, metric: str, names: list[str], values: Mapping[str, object]) -> list[Target]:
    if metric not in values:
        raise TrialsError(
            f"equals in {table.where} is for figures read by [values], not for {metric!r}; expected at_most "
            f"or at_least: use one of them"
        )
    other = table.text("equals")
    if other not in names:
        raise table.wrong("equals", f"the name of a variant ({', '.join(map(repr, names))})")
    return [Target(metric, name, "equals", equals=other) for name in _judged(table, names, [other])]


def _judged(table: Table, names: list[str], spoken_of: list[str]) -> list[str]:
    """Return the variants that a target is for: those it names, else all that its limit does not."""
    if "variant" not in table:
        return [name for name in names if name not in spoken_of]
    given = table.either("variant", str, list)
    chosen = [given] if isinstance(given, str) else given
    if not chosen or not all(name in names for name in chosen):
        raise table.wrong("variant", f"names of variants ({', '.join(map(repr, names))})")
    return chosen


def _ray(root: Table) -> RayOptions:
    table = Table(root.table("ray"), "[ray]", _RAY_KEYS)
    amounts = {}
    for key in ("gpus", "cpus"):
        if key in table:
            amounts[key] = table.take(key, float, 0.0)
            if amounts[key] < 0:
                raise table.wrong(key, "a number of at least 0")
    return RayOptions(table.text("address") or None, amounts.get("gpus"), amounts.get("cpus"))
