"""Match what two sides hold, row by row, and say what makes the difference. Pure.

A program that was changed has other lines, other functions and other names. Rows are matched in turns, each
with less in common than the one before; what a turn leaves over goes to the next. Nothing is lost: a row
without a counterpart is compared with 0.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final

from memtriage.model.difference import Difference, DifferenceRow, FigureChange, HeldRow, Side
from memtriage.model.prediction import EARLIER
from memtriage.model.units import signed, size

Pair = tuple[HeldRow | None, HeldRow | None]

_LINE: Final = re.compile(r":\d+ in ")


def difference(before: Side, after: Side) -> Difference:
    """Return what makes the difference of two sides of the same kind."""
    then = before.others.get(after.instant, before.rows)
    rows = [_row(*pair) for pair in matched(then, after.rows)]
    moved = before.total - sum(row.bytes for row in then)
    if moved:
        rows.append(_row(HeldRow(owner=f"{before.instant} was higher by", bytes=moved), None))
    total = after.total - before.total
    way = -1 if total < 0 else 1
    rows = sorted(
        (row for row in rows if row.difference),
        key=lambda row: (row.difference * way < 0, -abs(row.difference), row.owner, row.module or ""),
    )
    return Difference(
        of=after.of,
        difference=total,
        summary=_summary(before, after, rows),
        rows=rows,
        suspects=_suspects(before, after),
        before=before.total,
        after=after.total,
        figures={
            name: FigureChange(before=before.figures.get(name), after=after.figures.get(name))
            for name in {**before.figures, **after.figures}
        },
    )


def matched(before: Sequence[HeldRow], after: Sequence[HeldRow]) -> list[Pair]:
    """Return each row of either side with its counterpart, if it has one."""
    pairs: list[Pair] = []
    old, new = list(before), list(after)
    renamed: dict[str | None, str | None] = {}

    def module_now(row: HeldRow) -> str | None:
        return renamed.get(row.module, row.module)

    turns: tuple[tuple[Callable[[HeldRow], Hashable], Callable[[HeldRow], Hashable]], ...] = (
        (_without_line, _without_line),
        # Of a module with another name all else stays: its rows are as large, and in the same order.
        (_content, _content),
        (
            lambda row: (row.owner, module_now(row), row.phase, row.rank),
            lambda row: (row.owner, row.module, row.phase, row.rank),
        ),
        (lambda row: (row.owner, module_now(row), row.rank), lambda row: (row.owner, row.module, row.rank)),
    )
    for key_before, key_after in turns:
        found, old, new = _turn(old, new, key_before, key_after)
        pairs += found
        if key_before is _content:
            renamed = _renamed(pairs)
    for row in [row for row in old if row.module]:
        # What a module did is done by one above or below it now.
        alike = (each for each in new if _kin(row, each) and _content(each)[:3] == _content(row)[:3])
        other = next(alike, None)
        if other is not None:
            old.remove(row)
            new.remove(other)
            pairs.append((row, other))
    return pairs + [(row, None) for row in old] + [(None, row) for row in new]


def _kin(row: HeldRow, other: HeldRow) -> bool:
    """Whether one's module is part of the other's."""
    shorter, longer = sorted(((row.module or ""), (other.module or "")), key=len)
    return bool(shorter) and longer.startswith(f"{shorter}.")


def _without_line(row: HeldRow) -> Hashable:
    return row.owner, row.module, row.site and _LINE.sub(" in ", row.site), row.phase, row.rank


def _content(row: HeldRow) -> tuple[str, str | None, int | None, int]:
    return row.owner, row.phase, row.rank, row.bytes


def _turn(
    before: Iterable[HeldRow],
    after: Iterable[HeldRow],
    key_before: Callable[[HeldRow], Hashable],
    key_after: Callable[[HeldRow], Hashable],
) -> tuple[list[Pair], list[HeldRow], list[HeldRow]]:
    """Pair the rows whose keys agree, those of the same size first, else in order; return what is left."""
    sides: dict[Hashable, tuple[list[HeldRow], list[HeldRow]]] = defaultdict(lambda: ([], []))
    for row in before:
        sides[key_before(row)][0].append(row)
    for row in after:
        sides[key_after(row)][1].append(row)
    pairs: list[Pair] = []
    left: tuple[list[HeldRow], list[HeldRow]] = [], []
    for old, new in sides.values():
        rest: list[HeldRow] = []
        for row in old:
            same = next((each for each in new if each.bytes == row.bytes), None)
            if same is None:
                rest.append(row)
            else:
                new.remove(same)
                pairs.append((row, same))
        both = min(len(rest), len(new))
        pairs += zip(rest[:both], new[:both], strict=True)
        left[0].extend(rest[both:])
        left[1].extend(new[both:])
    return pairs, *left


def _renamed(pairs: Iterable[Pair]) -> dict[str | None, str | None]:
    """Which module has become which, as most of the matched rows have it."""
    votes: dict[str | None, Counter[str | None]] = defaultdict(Counter)
    for old, new in pairs:
        if old is not None and new is not None:
            votes[old.module][new.module] += 1
    return {module: count.most_common(1)[0][0] for module, count in votes.items()}


def _row(old: HeldRow | None, new: HeldRow | None) -> DifferenceRow:
    row = new or old
    assert row is not None
    before, after = (0 if each is None else each.bytes for each in (old, new))
    return DifferenceRow(
        owner=row.owner,
        module=row.module,
        site=row.site,
        phase=row.phase,
        rank=row.rank,
        before=before,
        after=after,
        difference=after - before,
    )


def _suspects(before: Side, after: Side) -> list[str]:
    """What else differs between the sides, in words."""
    old, new = before.context, after.context
    found = [
        f"{name}: {old.get(name) or 'none'} -> {new.get(name) or 'none'}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
    if before.instant != after.instant:
        found.append(f"the peak moved: {before.instant} -> {after.instant}")
    return found


def _summary(before: Side, after: Side, rows: Sequence[DifferenceRow]) -> str:
    total = after.total - before.total
    if not total:
        return f"no difference: {size(after.total)} at {after.instant} in both"
    text = f"{signed(total)} at {after.instant}"
    if not rows:
        return text
    # What has the same owner and module belongs together, on whatever line it is made.
    sums: Counter[tuple[str, str | None]] = Counter()
    for row in rows:
        sums[row.owner, row.module] += row.difference * (1 if total > 0 else -1)
    (owner, module), most = sums.most_common(1)[0]
    largest = next(row for row in rows if (row.owner, row.module) == (owner, module))
    of = "" if module is None else f" of `{module}`"
    made = "" if largest.site is None else f", made at {largest.site}"
    kept = " and kept" if largest.phase is not None and largest.phase.endswith(EARLIER) else ""
    part = f"{size(most)} of it" if most <= abs(total) else f"{signed(most if total > 0 else -most)}"
    return f"{text}: {part} {owner}{of}{made}{kept}"
