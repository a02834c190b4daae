"""What trials of kernels allocate."""

import struct
from types import SimpleNamespace

import pytest
import torch

from memtriage.prediction.compiled import trials
from memtriage.prediction.compiled.trials import Kernel, KernelTrials
from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.lifetimes import FREE, Lifetimes
from memtriage.prediction.scratch.products import CUBLAS_WORKSPACE_LARGE, Workspaces

CACHE = 4096
MM = torch.ops.aten.mm.default


def lifetimes():
    return Lifetimes(lambda: True)


def trials_in(recorded):
    return KernelTrials(recorded, CACHE, Workspaces(machine("h200"), (2, 11), recorded))


def sizes_of(recorded):
    """Sizes in order, negative where the block goes."""
    size = {}
    changes = []
    for event in recorded.recording.events:
        if event.size != FREE:
            size[event.block] = event.size
        changes.append(size[event.block] if event.size != FREE else -size[event.block])
    return changes


def test_what_is_timed_runs_before_and_with_the_buffer_that_clears_the_cache():
    recorded = lifetimes()
    tried = trials_in(recorded)
    tried.time([512])
    assert sizes_of(recorded) == [512, -512, CACHE, 512, -512, -CACHE]
    assert tried.most == CACHE + 512


def test_a_padded_product_is_timed_after_the_plain_one_on_the_same_operands():
    recorded = lifetimes()
    tried = trials_in(recorded)
    tried.pad(MM, (), [1024, 512], 256, [], [640, 320])
    workspace = CUBLAS_WORKSPACE_LARGE  # of the first product, which stays
    plain = [256, workspace, -256, CACHE, 256, -256, -CACHE]
    padded = [640, 320, -320, -640, CACHE, 640, 320, -320, -640, -CACHE]
    assert sizes_of(recorded) == [1024, 512, *plain, *padded, -512, -1024]


def tune(monkeypatch, configurations, written=(), spares_memory=False, added=0):
    """Let kernels have so many configurations, and others added for their use of registers."""
    function = SimpleNamespace(arg_names=("in_out_ptr0", "out_ptr0", "xnumel"))
    tuner = SimpleNamespace(
        configs=range(configurations),
        fn=function,
        mutated_arg_names=written,
        optimize_mem=spares_memory,
    )
    monkeypatch.setattr(trials, "_tuner", lambda name, source: tuner)
    monkeypatch.setattr(trials, "_with_smaller_blocks", lambda tuner: configurations + added)


@pytest.mark.parametrize(("configurations", "expected"), [(1, []), (2, [CACHE, -CACHE])])
def test_a_kernel_is_tried_once_and_only_if_there_is_a_choice(monkeypatch, configurations, expected):
    tune(monkeypatch, configurations)
    recorded = lifetimes()
    kernel = Kernel("add", "", trials_in(recorded))
    for _ in range(2):
        kernel.run(torch.empty(4), torch.empty(4), 4, stream=0)
    assert sizes_of(recorded) == expected


@pytest.mark.parametrize(
    ("kept", "steps", "times"), [(True, (0, 1), 1), (False, (0, 1), 2), (True, (0, 0), 2), (True, (1, 1), 1)]
)
def test_a_kernel_compiled_after_the_first_step_is_not_tried_again_if_its_choice_was_kept(
    monkeypatch, kept, steps, times
):
    tune(monkeypatch, 2) if kept else tune(monkeypatch, 1, added=1)
    recorded = lifetimes()
    tried = trials_in(recorded)
    for step in steps:
        recorded.enter("step", step)
        Kernel("add", "the same", tried).run(torch.empty(4), torch.empty(4), 4, stream=0)
    Kernel("add", "another", tried).run(torch.empty(4), torch.empty(4), 4, stream=0)
    assert sizes_of(recorded) == [CACHE, -CACHE] * (times + 1)


def test_kernels_that_are_compiled_before_a_choice_are_all_tried(monkeypatch):
    tune(monkeypatch, 2)
    recorded = lifetimes()
    tried = trials_in(recorded)
    for kernel in [Kernel("add", "the same", tried) for _ in range(2)]:
        kernel.run(torch.empty(4), torch.empty(4), 4, stream=0)
    assert sizes_of(recorded) == [CACHE, -CACHE] * 2


def test_an_operand_that_is_written_is_copied_with_its_gaps(monkeypatch):
    tune(monkeypatch, 2, ["in_out_ptr0"])
    recorded = lifetimes()
    given = torch.empty_strided((2, 3), (8, 1))
    Kernel("add", "", trials_in(recorded)).run(given, torch.empty(6), 6, stream=0)
    copy = (8 + 2 + 1) * 4
    assert sizes_of(recorded) == [copy, -copy, CACHE, copy, -copy, -CACHE]


def test_copies_that_would_raise_the_peak_go_to_the_host(monkeypatch):
    tune(monkeypatch, 2, ["in_out_ptr0"], spares_memory=True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 64)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    recorded = lifetimes()
    Kernel("add", "", trials_in(recorded)).run(torch.empty(32), torch.empty(32), 32, stream=0)
    assert sizes_of(recorded) == [CACHE, -CACHE]


class Tuner:
    """A reduction with one configuration, to which Inductor adds one above 32 registers."""

    configs = ("one",)

    def _dynamic_scale_rblock(self):
        if self.compile_results[0].kernel.n_regs > 32:
            self.compile_results.append(self._precompile_config("smaller"))
            self._make_launchers()


@pytest.mark.parametrize(("used", "configurations"), [(32, 1), (93, 2), (None, 2)])
def test_smaller_blocks_are_tried_where_a_kernel_uses_many_registers(monkeypatch, used, configurations):
    monkeypatch.setattr(trials, "registers", lambda tuner, config: used)
    assert trials._with_smaller_blocks(Tuner()) == configurations


def test_a_kernel_to_which_nothing_would_be_added_is_not_compiled(monkeypatch):
    monkeypatch.setattr(trials, "registers", lambda tuner, config: pytest.fail("compiled"))
    never = SimpleNamespace(configs=("one",), _dynamic_scale_rblock=lambda: None)
    assert trials._with_smaller_blocks(never) == 1


def test_registers_are_read_from_a_cubin():
    attribute = trials._REGISTER_COUNT + struct.pack("<II", 10, 54)
    assert trials._in_cubin(b"\x7fELF" + attribute + b"\x00") == 54
    assert trials._in_cubin(b"\x7fELF") is None
