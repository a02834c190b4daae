"""Allocation sites: the user's line, and recorders put back as they were."""

from __future__ import annotations

import linecache
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memtriage.observe import cuda, sites
from memtriage.observe.origin import package_folder
from memtriage.observe.sites import SiteRecorder, enclosing_function


def site(marker: str, function: str) -> str:
    """The site of the line that ends in a comment with this marker."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [at for at, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return f"test_sites.py:{number} in {function}"


@pytest.fixture
def recorder() -> Iterator[SiteRecorder]:
    made = SiteRecorder(None)
    yield made
    made.stop()
    made.forget()
    assert not tracemalloc.is_tracing()
    assert not torch.is_anomaly_enabled()


class Stash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.noise = torch.rand(64)  # made in a context
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


class Block(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.exp()  # an activation
        return hidden.sin()


def plain_tensors() -> list[torch.Tensor]:
    return [torch.ones(64) for _ in range(3)]  # plain


def bytes_kept() -> list[bytes]:
    return [bytes(50_000) for _ in range(4)]  # bytes


def arrays_kept() -> list[Any]:
    return [np.ones(10_000) for _ in range(4)]  # arrays


def leaf() -> torch.Tensor:
    return torch.ones(64, requires_grad=True)


def test_tensors_made_while_objects_are_traced(recorder: SiteRecorder) -> None:
    before = torch.ones(64)
    recorder.trace_objects()
    kept = plain_tensors()
    out = Stash.apply(leaf())
    recorder.collect()
    assert {recorder.site_of(each) for each in kept} == {site("plain", "plain_tensors")}
    assert recorder.site_of(out.grad_fn.noise) == site("made in a context", "forward")
    assert recorder.site_of(before) is None
    assert recorder.site_of(torch.ones(64)) is None


def test_an_activation_that_only_the_graph_holds(recorder: SiteRecorder) -> None:
    before = Block()(leaf())
    recorder.trace_objects()
    recorder.trace_nodes()
    out = Block()(leaf())
    stashed = Stash.apply(leaf())  # a custom function
    recorder.collect()
    inner = out.grad_fn.next_functions[0][0]
    assert recorder.site_of(inner) == site("an activation", "forward")
    assert (
        recorder.site_of(stashed)
        == recorder.site_of(stashed.grad_fn)
        == site("a custom function", "test_an_activation_that_only_the_graph_holds")
    )
    assert recorder.site_of(before) is recorder.site_of(before.grad_fn) is None


@pytest.mark.parametrize("recorded", [False, True])
def test_a_view_made_while_recording_is_not_where_its_block_comes_from(
    recorder: SiteRecorder, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    """A detached result that is stored after the recording began; its block is older."""
    recorder.trace_objects()
    (view,) = (tensor.detach() for tensor in plain_tensors()[:1])
    block = SimpleNamespace(address=2, site="train.py:3 in main" if recorded else None)
    monkeypatch.setattr(cuda, "segments", lambda **_: [SimpleNamespace(blocks=[block])])
    monkeypatch.setattr(sites, "storage_facts", lambda _: SimpleNamespace(device="cuda:0", address=1))
    recorder.collect()
    assert (recorder.site_of(view) is None) == recorded


def test_sites_are_forgotten(recorder: SiteRecorder) -> None:
    recorder.trace_objects()
    (kept, *_) = plain_tensors()
    recorder.collect()
    assert recorder.site_of(kept) is not None
    recorder.forget()
    assert recorder.site_of(kept) is None
    assert recorder.live_by_line() == {}


def test_live_memory_by_line(recorder: SiteRecorder) -> None:
    recorder.trace_objects()
    kept = bytes_kept(), arrays_kept()
    bytes_kept()  # gone at once
    recorder.collect()
    live = {recorder.named([line]): nbytes for line, nbytes in recorder.live_by_line().items()}
    assert 200_000 <= live[site("bytes", "bytes_kept")] < 210_000
    assert 320_000 <= live[site("arrays", "arrays_kept")] < 330_000
    del kept
    assert not [filename for filename, _ in recorder.live_by_line() if "memtriage/observe" in filename]


def test_what_a_library_makes_for_the_watch_has_no_line(recorder: SiteRecorder) -> None:
    own: dict[str, Any] = {}
    code = "import json\ndef estimate(text): return json.loads(text)"
    exec(compile(code, os.path.join(package_folder(), "estimate.py"), "exec"), own)
    recorder.trace_objects()
    kept = own["estimate"](str(list(range(50_000))))
    recorder.collect()
    assert len(kept) == 50_000
    assert sum(recorder.live_by_line().values()) < 100_000


def test_paths_below_the_scripts_folder_are_relative() -> None:
    recorder = SiteRecorder(str(Path(__file__).parents[1]))
    recorder.trace_objects()
    (kept, *_) = plain_tensors()
    recorder.collect()
    assert recorder.site_of(kept) == f"observe/{site('plain', 'plain_tensors')}"
    recorder.forget()


def test_everything_is_put_back(recorder: SiteRecorder) -> None:
    torch.set_anomaly_enabled(False, True)
    recorder.start()
    assert not recorder.recording
    recorder.trace_objects()
    assert tracemalloc.is_tracing()
    assert recorder.recording
    recorder.trace_nodes()
    assert not tracemalloc.is_tracing()  # one at a time
    assert torch._C.is_anomaly_enabled()
    assert not torch._C.is_anomaly_check_nan_enabled()
    (torch.nn.Linear(4, 4)(torch.ones(4)) * leaf()[:4]).sum()
    recorder.stop()
    recorder.stop()
    assert not recorder.recording
    assert not torch._C.is_anomaly_enabled()
    assert torch._C.is_anomaly_check_nan_enabled()


def test_the_stacks_of_nodes_read_no_file(recorder: SiteRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("called inside the program's operation")

    recorder.trace_nodes()
    linecache.clearcache()
    with monkeypatch.context() as patched:
        for name in ("stat", "open", "fstat"):
            patched.setattr(os, name, refuse)
        loss = (leaf() * 2).sum()  # stack
    assert linecache.cache == {}
    recorder.collect()
    assert recorder.site_of(loss.grad_fn) == site("stack", "test_the_stacks_of_nodes_read_no_file")


def test_a_stack_in_the_programs_own_anomaly_mode_is_torchs(recorder: SiteRecorder) -> None:
    recorder.trace_nodes()
    with torch.autograd.set_detect_anomaly(True):
        own = (leaf() * 2).grad_fn.metadata["traceback_"]
    (borrowed,) = (leaf() * 2).grad_fn.metadata["traceback_"][-1:]
    assert own[-1].splitlines()[0].rpartition(",")[2] == borrowed.rstrip().rpartition(",")[2]
    assert [len(text.splitlines()) > 1 for text in (own[-1], borrowed)] == [True, False]


def test_nan_in_backward_is_no_error(recorder: SiteRecorder) -> None:
    recorder.trace_nodes()
    x = leaf()
    (x * float("nan")).sum().backward()
    assert torch.isnan(x.grad).all()


def test_enclosing_function(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(
        "x = 1\nclass A:\n    def outer(self):\n        def inner():\n            pass\n        return x\n"
    )
    named = [enclosing_function(str(file), line) for line in range(1, 7)]
    assert named == ["<module>", "<module>", "outer", "inner", "inner", "outer"]
    assert enclosing_function(str(tmp_path / "missing.py"), 1) == "<module>"
    broken = tmp_path / "broken.py"
    broken.write_text("def :")
    assert enclosing_function(str(broken), 1) == "<module>"


def test_tables_count_in_malloc_with_what_was_usual_until_they_are_measured() -> None:
    assert SiteRecorder(None).in_malloc(1000) == 1900
