"""Small programs under `torch.compile`, compiled for a GPU that is not there."""

from __future__ import annotations

import gc
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import memtriage
from memtriage.prediction.compiled import inductor, trials
from support.training import training

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Inductor needs Triton to compile for GPUs"
)

ROWS, WIDTH = 4096, 1024
VALUES = ROWS * WIDTH * 4


def of_function(function, *, compiled, shape=(1,)):
    """A build function whose step runs `function` on new values and a weight, goes backward and steps."""

    def build(device):
        model = torch.nn.ParameterList([torch.randn(shape, device=device)])
        called = torch.compile(function, dynamic=False) if compiled else function
        return training(
            model, lambda: called(torch.randn(ROWS, WIDTH, device=device, requires_grad=True), model[0])
        )

    return build


def chain(values, weight):
    for _ in range(4):
        values = values.sin()
    return values.sum() * weight.sum()


def test_fused_operators_keep_their_input_alone():
    eager = memtriage.predict(of_function(chain, compiled=False))
    compiled = memtriage.predict(of_function(chain, compiled=True))
    # Eager code keeps what each sine took; compiled code takes its input again.
    assert eager.peak_allocated >= 5 * VALUES
    assert 2 * VALUES <= compiled.peak_allocated < 3 * VALUES


def test_everything_is_as_before_afterwards():
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.async_compile import AsyncCompile
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._triton import has_triton

    watched = [
        (AsyncCompile, "triton"),
        (CudaInterface, "current_device"),
        (FakeTensor, "__torch_dispatch__"),
    ]
    before = [vars(owner)[name] for owner, name in watched]
    here = has_triton()  # torch remembers it: it is of this machine, not of the GPU
    prediction = memtriage.predict(of_function(chain, compiled=True))
    assert prediction.compile_trials is not None
    assert [vars(owner)[name] for owner, name in watched] == before
    assert has_triton() == here


def test_the_garbage_collector_rests_while_something_is_compiled_alone():
    seen = {"compiled": [], "run": []}

    def looked_at(graph, inputs):
        seen["compiled"].append(gc.isenabled())
        return graph.forward

    def build(device):
        weight = torch.nn.Parameter(torch.randn(8, device=device))
        other = torch.compile(lambda values: values.cos())
        called = torch.compile(lambda values: values.sin().sum(), backend=looked_at)

        def step():
            called(other(weight)).backward()
            seen["run"].append(gc.isenabled())

        return torch.nn.ParameterList([weight]), torch.optim.SGD([weight]), step

    memtriage.predict(build)
    assert seen == {"compiled": [False], "run": [True, True]}
    assert gc.isenabled()


def build_convolution(device):
    model = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False, device=device).to(
        memory_format=torch.channels_last
    )
    compiled = torch.compile(lambda images: F.gelu(model(images)).sum())

    def loss():
        images = torch.randn(8, 64, 32, 32, device=device).to(memory_format=torch.channels_last)
        return compiled(images)

    return training(model, loss)


def test_convolutions_keep_their_layout():
    prediction = memtriage.predict(build_convolution)
    assert not prediction.notes
    assert prediction.peak_allocated >= 3 * 8 * 64 * 32 * 32 * 4


def test_another_length_compiles_again_for_any_length():
    lengths = []

    def build(device):
        weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
        compiled = torch.compile(lambda values: (values @ weight)[:, : WIDTH // 2].tanh().sum())

        def step():
            for rows in (512, 2048, 1024):
                compiled(torch.randn(rows, WIDTH, device=device)).backward()
                lengths.append(torch.cuda.memory_allocated())

        return torch.nn.ParameterList([weight]), torch.optim.SGD([weight]), step

    memtriage.predict(build)
    assert len(set(lengths[3:])) == 1


def test_dropout_of_recomputed_attention_is_drawn_again():
    def attention(values, weight):
        heads = (values @ weight).view(4, 16, 64, WIDTH).transpose(1, 2).contiguous()[..., :64]
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        return mixed.sum()

    def recomputed(values, weight):
        return checkpoint(attention, values, weight, use_reentrant=False)

    build = of_function(recomputed, compiled=True, shape=(WIDTH, WIDTH))
    prediction = memtriage.predict(build)
    assert prediction.compile_trials is not None


def build_adamw(decorated):
    """A layer whose optimizer's step is compiled: the method itself, or a function that calls it."""

    def build(device):
        model = torch.nn.Linear(WIDTH, WIDTH, device=device)
        optimizer = torch.optim.AdamW(model.parameters())
        update = torch.compile((lambda: optimizer.step()) if decorated else optimizer.step)

        def step():
            model(torch.randn(8, WIDTH, device=device)).sum().backward()
            update()
            optimizer.zero_grad()

        return model, optimizer, step

    return build


@pytest.mark.parametrize(
    "made",
    [
        lambda values: torch.tensor(-1.0, device=values.device),
        lambda values: torch.ones((), device=values.device),
        lambda values: torch.arange(WIDTH, device=values.device),
        lambda values: torch.full((WIDTH,), 2.0, device=values.device),
    ],
    ids=["tensor", "ones", "arange", "full"],
)
def test_factories_are_calls_of_the_graph(made):
    def scaled(values, weight):
        return (values + made(values)).sum() * weight.sum()

    graphs = inductor.graphs()
    memtriage.predict(of_function(scaled, compiled=True))
    assert inductor.graphs() == graphs + 1  # no break of the graph


def test_a_graph_that_no_backend_can_compile_is_broken():
    """Its backward reads values on the host, like experts of transformers in single precision."""

    @torch.library.custom_op("memtriage_test::grouped", mutates_args=())
    def grouped(values: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return values.clone()

    grouped.register_fake(lambda values, ends: torch.empty_like(values))
    grouped.register_autograd(
        lambda ctx, gradient: (gradient * len(ctx.ends.tolist()), None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "ends", inputs[1]),
    )

    def experts(values, weight):
        return chain(grouped(values, torch.ones(3, device=values.device, dtype=torch.int64)), weight)

    assert memtriage.predict(of_function(experts, compiled=True)).peak_allocated >= 2 * VALUES


def test_registers_of_a_reduction_are_counted(monkeypatch):
    counted = []
    counts = trials.registers
    monkeypatch.setattr(trials, "registers", lambda *args: counted.append(counts(*args)) or counted[-1])

    def normalized(values, weight):
        return F.cross_entropy(values @ weight, torch.zeros(ROWS, device=values.device, dtype=torch.int64))

    memtriage.predict(of_function(normalized, compiled=True, shape=(WIDTH, 32_000)))
    assert counted
    assert all(16 <= count <= 255 for count in counted)


@pytest.mark.parametrize("decorated", [False, True])
def test_states_of_a_compiled_optimizer_are_kept(decorated):
    prediction = memtriage.predict(build_adamw(decorated), steps=3)
    assert not any("no optimizer stepped" in note for note in prediction.notes)
    parameters = WIDTH * WIDTH * 4
    assert prediction.by_owner["optimizer state"] >= 2 * parameters
    first, second, third = (step.end_allocated for step in prediction.steps)
    assert first == second == third  # made in the first step, and kept
    assert prediction.compile_trials is not None


@pytest.mark.parametrize(("gpu", "timed"), [("h200", True), ("l4", False)])
def test_products_are_timed_where_inductor_takes_them_for_bound_by_arithmetic(gpu, timed):
    """It knows the rates of an L4, and is wrong about those of an H200."""
    inner, columns = 300, 8001

    def product(values, weight):
        return (values[:, :inner].to(torch.bfloat16) @ weight.to(torch.bfloat16)).sum()

    build = of_function(product, compiled=True, shape=(inner, columns))
    notes = memtriage.predict(build, gpu=gpu).notes
    assert any("Inductor pads 2 matrix products" in note for note in notes) is timed


def attention_with_a_mask(device, compiled):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    project = torch.nn.Linear(64, 3 * 64, device=device)
    attend = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1024, 1024, device=device)

    def loss():
        parts = project(torch.randn(2, 1024, 64, device=device)).view(2, 1024, 3, 4, 16)
        return attend(*parts.permute(2, 0, 3, 1, 4), block_mask=mask).sum()

    return training(project, loss)


def test_flex_attention_makes_scores_in_eager_code_alone():
    scores = 2 * 4 * 1024 * 1024 * 4
    eager = memtriage.predict(lambda device: attention_with_a_mask(device, False))
    compiled = memtriage.predict(lambda device: attention_with_a_mask(device, True))
    assert eager.peak_allocated > 3 * scores
    assert compiled.peak_allocated - compiled.by_owner["workspace"] < scores


def test_products_of_eight_bits_write_into_what_they_are_given():
    def product(values, weight):
        scale = values.detach().amax()
        left, right = (given.detach().to(torch.float8_e4m3fn) for given in (values, weight))
        made = torch._scaled_mm(left, right.t(), scale, scale, out_dtype=torch.bfloat16)
        return made.float().sum() + values.sum() * weight.sum()

    build = of_function(product, compiled=True, shape=(WIDTH, WIDTH))
    assert memtriage.predict(build).peak_allocated >= VALUES


def test_a_smaller_activation_budget_keeps_less():
    def layers(values, weight):
        for _ in range(6):
            values = (values @ weight).tanh()
        return values.sum()

    def build_within(budget):
        made = of_function(layers, compiled=True, shape=(WIDTH, WIDTH))

        def build(device):
            model, optimizer, step = made(device)

            def within():
                with torch._functorch.config.patch(activation_memory_budget=budget):
                    step()

            return model, optimizer, within

        return build

    whole, half, least = (
        memtriage.predict(build_within(budget)).by_owner["activation"] for budget in (1.0, 0.5, 0.1)
    )
    assert whole - half >= 2 * VALUES
    assert half - least >= VALUES


def test_methods_that_a_trace_replaces_are_traced_by_dynamo():
    """`new_ones` within `vmap`: a break of the graph is none on a GPU, and an error with `fullgraph`."""
    from torch.nn.attention.flex_attention import create_block_mask, noop_mask

    def build(device):
        model = torch.nn.ParameterList([torch.randn(64, device=device)])
        masked = torch.compile(create_block_mask, dynamic=False, fullgraph=True)

        def loss():
            mask = masked(noop_mask, None, None, 256, 256, device=device)
            return (model[0] * mask.kv_num_blocks.sum()).sum()

        return training(model, loss)

    assert memtriage.predict(build).peak_allocated


def test_shards_get_their_shapes_while_something_is_compiled():
    """DTensor runs an operator on the host's fakes: within a kernel these must say that they have no data."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    def build(device):
        doubled = torch.compile(lambda values: values * 2)
        mesh = init_device_mesh("cuda", (2,))
        whole = distribute_tensor(torch.empty(64, 32, device=device), mesh, [Shard(0)])
        torch.nn.init.trunc_normal_(whole)
        model = torch.nn.ParameterList([whole.to_local()])
        return training(model, lambda: doubled(model[0]).sum())

    assert memtriage.predict(build, world_size=2).peak_allocated
