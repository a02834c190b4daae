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
        page.line((f"{len(here) - len(shown)} more are not installed: `memtriage holders --all`", "dim"))


def _libraries(here: Iterable[HolderHere]) -> Iterator[tuple[str, str | None]]:
    seen: dict[str, str | None] = {holder.library: holder.version for holder in here if holder.versions}
    return ((library, version) for library, version in seen.items() if library not in _NO_LIBRARY)


_NO_LIBRARY: Final = ("any program",)


def _entry(page: Page, holder: HolderHere) -> None:
    page.gap()
    page.line((f"  {holder.name}", "bold"), (f"  {holder.kind}, cleared: {holder.policy}", ""))
    page.field("symbol", holder.symbol, labels=_LABELS)
    page.field("keeps", holder.holds, labels=_LABELS)
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

Libraries keep memory between steps, such as copies of weights, workspaces and buffers. memtriage recognizes
those listed below, its *known holders*. Reports use their names (`te.fp8_workspaces: model.layers[*]...`).

```text
memtriage holders [--all] [--json]
```

List the known holders of the installed libraries: the symbol, what clears it and when it must not be cleared,
and when it is filled again.

| option | meaning |
|---|---|
| `--all` | also list libraries and versions that are not installed |
| `--json` | only the whole catalogue on stdout, as JSON |

**Exit status**: 0.

## clear_caches

```python
report = memtriage.clear_caches()  # everything that may be cleared now
report = memtriage.clear_caches(["weight copies"])  # a kind
report = memtriage.clear_caches(["torch.dynamo"])  # one of them, by name
print("\\n".join(report.lines()))
```

The report has what each entry held and freed, or why it was skipped. Garbage is collected and the allocator's
cache emptied.

| cleared | meaning |
|---|---|
| `automatic` | cleared, unless a captured CUDA graph may use it or a backward may still run |
| `on request` | cleared only if you pass its name or kind: slow to rebuild, or other ranks take part |
| `never` | only reported: model state, or the program's own |

`between_steps=True` promises that no backward will run. If cuBLAS made its workspace during a capture,
clearing is refused even after the graph is gone: call `torch._C._cuda_clearCublasWorkspaces()`.

A cache of your own is reported and cleared like the others until `remove()`:

```python
cache = {}
registration = memtriage.register_holder("rope tables", lambda: cache, cache.clear)
...
registration.remove()
```

## TransformerEngine #1935

```python
from memtriage.treat.te_restore import EmptyAfterRestore

with EmptyAfterRestore():
    train()
```

Before 2.15, backward leaves saved tensors in `ctx.tensor_objects` (`te.tensor_objects`). Inside the block
each list is emptied as soon as backward has read it; a retained graph keeps its list. Gradients are identical
to the bit. `undo()` restores the library's functions.
"""

_TABLE_HEAD: Final = "| name | keeps | cleared |\n|---|---|---|"


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
    yield "## Not recognized"
    yield ""
    yield "| library | what keeps memory | what helps |\n|---|---|---|"
    for remark in REMARKS:
        yield f"| {remark.library} | {plain(remark.what)} | {plain(remark.helps)} |"
    yield ""


def _row(holder: Holder) -> str:
    keeps = (
        holder.holds if not holder.spans else f"{holder.holds}. Versions: {versions_in_words(holder.spans)}"
    )
    return f"| `{holder.name}` | {plain(keeps)} | {holder.policy} |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
