"""The catalogue of known holders: on the terminal, and as a page of the documentation.

python -m memtriage.report.holders > docs/holders.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from rich.console import Console

from memtriage.catalogue.catalogue import BUILT_IN
from memtriage.catalogue.entry import Holder
from memtriage.catalogue.installed import versions_in_words
from memtriage.catalogue.remarks import REMARKS
from memtriage.model.holders import HolderHere
from memtriage.report.console import Page
from memtriage.report.playbook import plain

_LABELS: Final = 17
_CONDITIONS: Final = {
    "graphs": "CUDA graphs are captured that may be replayed",
    "backward": "a backward is under way or pending",
}


def render(here: Sequence[HolderHere], console: Console, *, every: bool) -> None:
    """Print the entries.

    Args:
        here: the entries.
        console: where.
        every: those too that do not apply to what is installed.
    """
    page = Page(console)
    shown = [holder for holder in here if holder.applies or every]
    page.line(
        (f"{len(here)} known holders", "bold"),
        (f", {sum(holder.applies for holder in here)} of them in what is installed here", ""),
    )
    for library, version in _libraries(here):
        page.field(library, version or "not installed", labels=28)
    for library, group in groupby(shown, key=lambda holder: holder.library):
        page.heading(library)
        for holder in group:
            _entry(page, holder)
    if not every and len(shown) < len(here):
        page.gap()
        page.line((f"{len(here) - len(shown)} more do not apply here: `memtriage holders --all`", "dim"))


def _libraries(here: Iterable[HolderHere]) -> Iterator[tuple[str, str | None]]:
    seen: dict[str, str | None] = {holder.library: holder.version for holder in here if holder.versions}
    return ((library, version) for library, version in seen.items() if library not in _NO_LIBRARY)


_NO_LIBRARY: Final = ("any program",)


def _entry(page: Page, holder: HolderHere) -> None:
    page.gap()
    page.line((f"  {holder.name}", "bold"), (f"  {holder.kind}, cleared: {holder.policy}", ""))
    page.field("symbol", holder.symbol, labels=_LABELS)
    page.field("holds", holder.holds, labels=_LABELS)
    if holder.versions != "all":
        page.field("versions", holder.versions, labels=_LABELS)
        page.field("here", holder.reason, labels=_LABELS)
    if holder.clears:
        page.field("cleared by", holder.clears, labels=_LABELS)
    if holder.why:
        page.field("not by itself" if holder.policy == "on request" else "never", holder.why, labels=_LABELS)
    if holder.policy != "never":
        page.field("not while", conditions(holder.forbidden), labels=_LABELS)
    if holder.refills:
        page.field("refills", holder.refills, labels=_LABELS)


def conditions(forbidden: Iterable[str]) -> str:
    """When an entry must not be cleared, in words; a capture under way forbids all."""
    return "; ".join([*(_CONDITIONS[each] for each in forbidden), "a capture is under way"])


_HEAD: Final = """\
# Known holders

<!-- python -m memtriage.report.holders > docs/holders.md: edit src/memtriage/catalogue/ -->

Libraries keep memory between steps: copies of weights, workspaces, tables, buffers, the tensors of an
autograd node that has done its work. memtriage knows the holders below. Censuses, ledgers and findings name
them (`te.fp8_workspaces: model.layers[*]...`); a command shows them, and a function clears them.

## memtriage holders

```text
memtriage holders [--all] [--json]
```

Shows which of them the installed versions of the libraries have: what each holds, what clears it, and when
that must not be done.

| option | meaning |
|---|---|
| `--all` | entries of libraries and versions that are not installed too |
| `--json` | the whole catalogue alone on stdout, as JSON |

**Exit status**: 0.

## clear_caches

```python
report = memtriage.clear_caches()  # all that may be cleared now
report = memtriage.clear_caches(["weight copies"])  # a kind
report = memtriage.clear_caches(["torch.dynamo"])  # one of them, by name
print("\\n".join(report.lines()))
```

A library is never imported to look for it: an entry is found by what is loaded and by
attributes. Every device in use is synchronized, each entry is measured before and after, garbage is
collected, the allocator's cache emptied, and the report tells for each entry what it held, what went, or why
it was skipped:

- `automatic`: cleared unless forbidden at that moment.
- `on request`: cleared only if its name or kind is given, for it is slow to make again, or other ranks must
  take part.
- `never`: told, and left alone: it is model state, must be registered again, or is the program's own.
- *graphs*: not while CUDA graphs are captured: they may be replayed with the addresses. *backward*: not while
  one is under way or pending (a graph that is alive, with what it saved); `between_steps=True` says that none
  of these will be run. While a capture is under way nothing is cleared.
- A graph's pool outlives it where cuBLAS made its workspace during the capture. That looks like a graph that
  only C++ holds, and forbids the same; with no graph left, `torch._C._cuda_clearCublasWorkspaces()` ends it.

What goes at once is references. Bytes go when nothing else holds them: `freed` counts the storages that did.
Reserved memory goes where a segment became empty: a tiny holder can pin a large one.
`memtriage.account.holder_pins.pinned_by(segments, storages)` tells how much.

## A cache of your own

```python
cache = {}
registration = memtriage.register_holder("rope tables", lambda: cache, cache.clear)
...
registration.remove()
```

From then on it is named, measured and cleared like the others.

## TransformerEngine #1935

```python
from memtriage.treat.te_restore import EmptyAfterRestore

with EmptyAfterRestore():
    train()
```

Versions before 2.15 write saved tensors back into `ctx.tensor_objects` and leave them there when backward
is done (`te.tensor_objects`). Inside the block the list is emptied as soon as backward has read it; gradients
are the same to the bit, a kept graph keeps its list, and `undo()` puts the library's functions back. Not
every use fills the list with more than `None`: with FP8 attention of `DelayedScaling(fp8_dpa=True)` (2.12.0,
one H200) nothing was left after.
"""

_TABLE_HEAD: Final = (
    "| name | symbol | holds | cleared by | cleared | not while | refills |\n|---|---|---|---|---|---|---|"
)


def markdown() -> str:
    """Return the whole page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD
    for library, group in groupby(BUILT_IN, key=lambda holder: holder.library):
        yield f"## {library[0].upper()}{library[1:]}"
        yield ""
        yield _TABLE_HEAD
        yield from map(_row, group)
        yield ""
    yield "## Known, and not looked for"
    yield ""
    yield "| library | what keeps memory | what helps |\n|---|---|---|"
    for remark in REMARKS:
        yield f"| {remark.library} | {plain(remark.what)} | {plain(remark.helps)} |"
    yield ""


def _row(one: Holder) -> str:
    policy = one.policy if not one.why else f"{one.policy}: {one.why}"
    holds = one.holds if not one.spans else f"{one.holds}. Versions: {versions_in_words(one.spans)}"
    forbidden = ", ".join(one.forbidden) if one.policy != "never" else ""
    cells = (one.symbol, holds, one.clears, policy, forbidden, one.refills)
    return f"| `{one.name}` | {' | '.join(map(plain, cells))} |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
