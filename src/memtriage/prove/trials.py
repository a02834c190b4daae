"""The trials file: what runs, under which variants, how often, and which targets are to be met."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from memtriage.prove.limits import METRICS, Dimension, Limit, parse_limit
from memtriage.prove.table import (
    TIME_SPAN,
    CommonTable,
    TargetTable,
    TrialsError,
    TrialsTable,
    VariantTable,
    parse_seconds,
    read_tables,
    wrong_value,
)

_LONGEST_NAME: Final = 60
_VALUE_NAME: Final = re.compile(r"[A-Za-z_]\w*")

Sense = Literal["at_most", "at_least", "equals"]
_SENSES: Final[tuple[Sense, ...]] = ("at_most", "at_least", "equals")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the job.

    Attributes:
        name: as in the table.
        args: the script's arguments, the common ones first.
        env: variables to set; None for one that is to be absent.
        allocator: settings of the CUDA caching allocator, empty for its defaults; None leaves what the
            environment says.
        phase: whether `memtriage.phase` frees memory at the end of a phase; None leaves it to the script.
        host_tuning: run with malloc's settings, as `memtriage run --host-tuning`.
    """

    name: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    allocator: str | None = None
    phase: bool | None = None
    host_tuning: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A demand on a metric of a variant.

    Attributes:
        metric: one of `limits.METRICS`, or a value read from the output.
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
class Trials:
    """A trials file, read and checked. Its keys are described in docs/compare.md.

    Attributes:
        script: absolute; None where `module` is run.
        python: None for the interpreter that runs memtriage.
        timeout_s: what a trial may take; None for any time.
        variants: at least one; names are unique.
        values: name and expression of each figure that is read from the output.
        targets: one variant each.
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
        document = msgspec.toml.decode(path.read_bytes())
    except OSError as error:
        raise TrialsError(f"{path}: {error.strerror}; expected a trials file: check the path") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TrialsError(f"{path}: invalid TOML ({error}); expected a trials file: correct it") from error
    try:
        return parse_trials(document, path)
    except TrialsError as error:
        raise TrialsError(f"{path}: {error}") from None


def parse_trials(document: Mapping[str, Any], path: Path) -> Trials:
    """Return the trials that a decoded file describes; relative paths in it start at the file's directory.

    Raises:
        TrialsError: something in it makes no sense.
    """
    tables = read_tables(document)
    if tables.trials is None:
        raise TrialsError("there is no table [trials]; expected one that names script or module: add it")
    trials = tables.trials
    base = path.absolute().parent
    script, module = _program(trials, base)
    variants = _variants(tables.variant, trials)
    names = [variant.name for variant in variants]
    values = _values(tables.values)
    for name in names:
        if name in _dimensions(values):
            raise TrialsError(f"variant {name!r} is named as a metric; expected another name: change it")
    baseline = trials.baseline or names[0]
    if baseline not in names:
        raise wrong_value("baseline", baseline, "[trials]", f"the name of a variant ({_listed(names)})")
    directory = base / trials.directory
    if not directory.is_dir():
        raise wrong_value("directory", trials.directory, "[trials]", f"a directory that exists, from {base}")
    targets = [
        target
        for number, table in enumerate(tables.target, 1)
        for target in _targets(table, f"[[target]] {number}", names, values)
    ]
    return Trials(
        path=path,
        name=trials.name or path.stem,
        script=script,
        module=module,
        python=trials.python,
        directory=directory.resolve(),
        ranks=trials.ranks,
        repeats=trials.repeats,
        warmup=trials.warmup,
        timeout_s=_timeout(trials.timeout),
        mark=trials.mark or trials.step,
        step=trials.step,
        baseline=baseline,
        give_up_after=trials.give_up_after,
        variants=variants,
        values=values,
        targets=tuple(targets),
    )


def _program(trials: TrialsTable, base: Path) -> tuple[Path | None, str | None]:
    script, module = trials.script, trials.module
    if (script is None) == (module is None):
        given = "neither" if script is None else "both"
        raise TrialsError(f"[trials] names {given} script and module; expected one of them: give one")
    if script is None:
        return None, module
    if not (base / script).exists():
        raise wrong_value("script", script, "[trials]", f"a Python file, from {base}")
    return (base / script).resolve(), None


def _timeout(given: str | float | None) -> float | None:
    if given is None:
        return None
    span = parse_seconds(given) if isinstance(given, str) else given
    if not span or span <= 0:
        raise wrong_value("timeout", given, "[trials]", TIME_SPAN)
    return span


def _variants(tables: list[VariantTable], trials: TrialsTable) -> tuple[Variant, ...]:
    if not tables:
        raise TrialsError("there is no [[variant]]; expected at least one, with a name: add it")
    common_env = _environment(trials, "[trials]")
    variants: list[Variant] = []
    for number, table in enumerate(tables, 1):
        where = f"[[variant]] {number}"
        name = table.name
        if name is None or len(name) > _LONGEST_NAME or "'" in name or not name.isprintable():
            expected = f'a text of at most {_LONGEST_NAME} characters, without "\'"'
            raise wrong_value("name", name, where, expected)
        if name in (other.name for other in variants):
            raise wrong_value("name", name, where, "a name that no other variant has")
        own, common = table.memtriage, trials.memtriage
        variants.append(
            Variant(
                name=name,
                args=tuple(map(str, trials.args + table.args)),
                env={**common_env, **_environment(table, where)},
                allocator=_allocator(trials if table.allocator is None else table),
                phase=common.phase if own.phase is None else own.phase,
                host_tuning=bool(common.host_tuning if own.host_tuning is None else own.host_tuning),
            )
        )
    return tuple(variants)


def _environment(table: CommonTable, where: str) -> dict[str, str | None]:
    env: dict[str, str | None] = {}
    for key, value in table.env.items():
        if value is False:
            env[key] = None
        elif isinstance(value, str | int | float) and value is not True:
            env[key] = str(value)
        else:
            expected = f"for {key!r} a text, a number, or false for a variable to be absent"
            raise wrong_value("env", table.env, where, expected)
    return env


def _allocator(table: CommonTable) -> str | None:
    options = table.allocator
    if isinstance(options, dict):
        return ",".join(f"{key}:{value}" for key, value in options.items())
    return None if options is None else options.strip()


def _values(given: Mapping[str, object]) -> dict[str, re.Pattern[str]]:
    values = {}
    for name, expression in given.items():
        if not _VALUE_NAME.fullmatch(name) or name in METRICS:
            raise TrialsError(
                f"{name!r} in [values] cannot name a value; expected letters, digits and '_', and no "
                f"metric: choose another"
            )
        if not isinstance(expression, str) or not expression.strip():
            raise wrong_value(name, expression, "[values]", "a text that is not empty")
        try:
            pattern = re.compile(expression)
        except re.error as error:
            raise wrong_value(name, expression, "[values]", f"a regular expression ({error})") from None
        if pattern.groups != 1:
            expected = "a regular expression with one group, e.g. 'loss ([0-9.]+)'"
            raise wrong_value(name, expression, "[values]", expected)
        values[name] = pattern
    return values


def _dimensions(values: Mapping[str, object]) -> dict[str, Dimension]:
    return {**METRICS, **dict.fromkeys(values, "number")}


def _targets(table: TargetTable, where: str, names: list[str], values: Mapping[str, object]) -> list[Target]:
    """Return the targets of a table: one for each variant that it judges."""
    dimensions = _dimensions(values)
    metric = table.metric
    if metric is None or metric not in dimensions:
        raise wrong_value("metric", metric, where, f"one of {_listed(dimensions)}")
    limits = {sense: limit for sense in _SENSES if (limit := getattr(table, sense)) is not None}
    if len(limits) != 1:
        raise TrialsError(
            f"{where} has {' and '.join(limits) or 'no limit'}; expected one of {_listed(_SENSES)}: give one"
        )
    if table.equals is not None:
        return _equal(table, table.equals, where, metric, names, values)
    ((sense, text),) = limits.items()
    try:
        limit = parse_limit(str(text), metric, names, dimensions)
    except TrialsError as error:
        raise TrialsError(f"{sense} in {where}: {error}") from None
    return [Target(metric, name, sense, limit) for name in _judged(table, where, names, limit.variants)]


def _equal(
    table: TargetTable, other: str, where: str, metric: str, names: list[str], values: Mapping[str, object]
) -> list[Target]:
    if metric not in values:
        raise TrialsError(
            f"equals in {where} is for figures read by [values], not for {metric!r}; expected at_most "
            f"or at_least: use one of them"
        )
    if other not in names:
        raise wrong_value("equals", other, where, f"the name of a variant ({_listed(names)})")
    return [Target(metric, name, "equals", equals=other) for name in _judged(table, where, names, [other])]


def _judged(table: TargetTable, where: str, names: list[str], others: Collection[str]) -> list[str]:
    """Return the variants that a target is for: those it names, else all that its limit does not name."""
    if table.variant is None:
        return [name for name in names if name not in others]
    judged = [table.variant] if isinstance(table.variant, str) else table.variant
    if not judged or not all(name in names for name in judged):
        raise wrong_value("variant", table.variant, where, f"names of variants ({_listed(names)})")
    return judged


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, names))
