"""TransformerEngine's structures are told by their shape, at their paths, and emptied as the library does."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from memtriage.catalogue.te_structures import release_symmetric_memory
from memtriage.catalogue.transformer_engine import TRANSFORMER_ENGINE
from support.holder_looks import clear_places, look, paths
from support.holder_standins import (
    NBYTES,
    CachingTensor,
    QuantizedLinear,
    QuantizedStorage,
    QuantizedTensor,
    Stage,
    tensor,
)

PYTORCH = "transformer_engine.pytorch"

pytestmark = pytest.mark.usefixtures("only_new_objects")


def test_communicators_are_told_without_bytes(stage: Stage) -> None:
    module = stage.module(f"{PYTORCH}.module.base", _ub_communicators={})
    assert paths("te.userbuffers") == []
    module.__dict__["_ub_communicators"] = {"qkv": object(), "fc1": object()}
    reading = look("te.userbuffers")
    assert (reading.places, reading.entries) == ([(f"{PYTORCH}.module.base._ub_communicators", 0)], 2)


def test_restored_tensors_are_a_list_with_quantized_ones_after_backward(stage: Stage) -> None:
    def node() -> Any:
        out = stage.keep(QuantizedLinear.apply(torch.ones(3, requires_grad=True)))
        out.sum().backward()
        return out.grad_fn

    restored = QuantizedStorage(tensor())
    for kept in ((restored,), [None], [tensor()], [QuantizedStorage()], None):
        node().tensor_objects = kept
    assert paths("te.tensor_objects") == []
    for name in ("_data", "_transpose", "_rowwise_data", "_columnwise_data"):
        holding = types.SimpleNamespace(**{name: tensor()})
        node().tensor_objects = [None, holding, restored]
    reading = look("te.tensor_objects")
    assert (len(reading.places), reading.entries) == (4, 8)
    assert clear_places("te.tensor_objects") == 4
    assert look("te.tensor_objects").places == []


def test_tensors_of_a_pending_backward_stay_in_their_objects(stage: Stage) -> None:
    """With retain_graph=True, and before backward, the list is what backward will read."""
    stage.module(PYTORCH)
    x = torch.ones(1000, requires_grad=True)
    out = QuantizedLinear.apply(x)
    held = out.grad_fn.tensor_objects
    assert paths("te.tensor_objects") == []
    out.sum().backward(retain_graph=True)
    assert paths("te.tensor_objects") == []
    out.sum().backward()
    assert held[1]._data is not None
    assert clear_places("te.tensor_objects") == 1
    assert out.grad_fn.tensor_objects is None


def test_a_workspace_of_a_module_is_a_filled_dict(stage: Stage) -> None:
    stage.module(PYTORCH)
    layers = [stage.keep(torch.nn.Linear(2, 2)) for _ in range(3)]
    layers[0]._fp8_workspaces = {}
    layers[1]._fp8_workspaces = [tensor()]
    assert paths("te.fp8_workspaces") == []


def test_an_emptied_permutation_workspace_is_as_the_library_made_it(stage: Stage) -> None:
    workspace, count = "_moe_permute_index_map_workspace", "_moe_permute_index_map_max_expanded_token_num"
    new = stage.module(f"{PYTORCH}.permutation", **{workspace: [tensor()], count: 8})
    other = stage.module(f"{PYTORCH}.other", **{workspace: tensor(), count: 9})
    unused = stage.module(f"{PYTORCH}.unused", **{workspace: [], count: 10})
    assert paths("te.permutation_workspace") == [
        f"{PYTORCH}.{name}.{workspace}" for name in ("permutation", "other")
    ]
    clear_places("te.permutation_workspace")
    assert [new.__dict__[name] for name in (workspace, count)] == [[], 0]
    assert [other.__dict__[name] for name in (workspace, count)] == [None, 0]
    assert [unused.__dict__[name] for name in (workspace, count)] == [[], 10]


def test_the_permutation_s_class_is_emptied_with_its_count(stage: Stage) -> None:
    class _moe_permute_index_map:
        workspace: Any = tensor()
        max_expanded_token_num = 8

    stage.module(f"{PYTORCH}.permutation", _moe_permute_index_map=_moe_permute_index_map)
    stage.module(f"{PYTORCH}.older", _moe_permute_index_map=lambda: None)
    clear_places("te.permutation_workspace")
    assert (_moe_permute_index_map.workspace, _moe_permute_index_map.max_expanded_token_num) == (None, 0)
    assert paths("te.permutation_workspace") == []


def test_every_buffer_of_the_global_state_is_told(stage: Stage) -> None:
    names = (
        "global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer",
        "fp8_tensors_recompute_buffer", "skip_fp8_weight_update_tensor",
    )  # fmt: skip
    filled = {name: [tensor()] for name in names}
    older = type("FP8GlobalStateManager", (), {**filled, "autocast_depth": 3})
    state = types.SimpleNamespace(**filled, fp8_graph_capturing=True)
    newer = type("FP8GlobalStateManager", (), {"quantization_state": state})
    stage.module(f"{PYTORCH}.fp8", FP8GlobalStateManager=older)
    stage.module(f"{PYTORCH}.quantization", FP8GlobalStateManager=newer)
    assert set(paths("te.global_state")) == {
        *(f"{PYTORCH}.fp8.FP8GlobalStateManager.{name}" for name in names),
        *(f"{PYTORCH}.quantization.FP8GlobalStateManager.quantization_state.{name}" for name in names),
    }


def test_scales_and_quantizers_of_a_module_are_filled_dicts(stage: Stage) -> None:
    stage.module(PYTORCH)
    layer, other = (stage.keep(torch.nn.Linear(2, 2)) for _ in range(2))
    layer.fp8_meta, layer.quantizers = {"scale": tensor()}, {"forward": [tensor()]}
    other.fp8_meta, other.quantizers = {}, [tensor()]
    assert paths("te.fp8_meta") == ["Linear.fp8_meta", "Linear.quantizers"]


def test_a_copy_of_a_parameter_counts_where_the_parameter_suffices_without_it(stage: Stage) -> None:
    stage.module(PYTORCH)

    def parameter(kind: type[QuantizedTensor], **inner: torch.Tensor | None) -> Any:
        made = kind(torch.zeros(1))
        made.__dict__.update(inner)
        return made

    model = stage.keep(torch.nn.Module())
    model._parameters.update(
        none=None,
        plain=torch.nn.Parameter(tensor()),
        droppable=parameter(CachingTensor, _transpose=tensor()),
        alone=parameter(CachingTensor, _transpose=tensor(), _data=None),
        undroppable=parameter(QuantizedTensor, _transpose=tensor()),
        columns=parameter(QuantizedTensor, _columnwise_data=tensor(), _rowwise_data=tensor()),
        columns_alone=parameter(QuantizedTensor, _columnwise_data=tensor()),
    )
    assert paths("te.float8_transpose") == ["Module.droppable._transpose"]
    assert paths("te.columnwise_data") == ["Module.columns._columnwise_data"]


def test_a_mark_that_is_taken_away_is_none(stage: Stage) -> None:
    stage.module(PYTORCH)
    marked = [stage.keep(tensor()) for _ in range(3)]
    marked[0]._do_not_clear = False
    assert paths("te.do_not_clear") == []
    marked[1]._do_not_clear = marked[2]._do_not_clear = True
    reading = look("te.do_not_clear")
    assert (reading.places, reading.entries) == ([("tensors marked _do_not_clear", 2 * NBYTES)], 2)


def test_remainders_are_int16_states_of_an_optimizer(stage: Stage) -> None:
    remainder = torch.zeros(5, dtype=torch.int16)

    class Adam:
        def __init__(self, state: Any, **own: Any) -> None:
            self.state = state
            self.__dict__.update(own)

        def step(self) -> None: ...

    one = {"master_param": remainder}
    groups: dict[str, Any] = {"param_groups": []}
    for state in (
        {1: {"master_param": tensor()}},
        {1: {"exp_avg": remainder}},
        {1: {"master_param": 3}},
        {1: remainder},
        [one],
        {},
    ):
        stage.keep(Adam(state, **groups))
    stage.keep(Adam({1: one}))
    stage.keep(types.SimpleNamespace(state={1: one}, **groups))
    assert paths("te.adam_remainders") == []
    stage.keep(Adam({1: {"master_param": tensor()}, 2: one, 3: {"exp_avg": tensor()}}, **groups))
    assert look("te.adam_remainders").places == [("Adam.state[*]['master_param']", 10)]


def test_offload_handlers_are_told_by_their_filled_maps(stage: Stage) -> None:
    stage.module(f"{PYTORCH}.cpu_offload", OFFLOAD_SYNCHRONIZER=None)
    kind = type("SynchronizedGroupOffloadHandler", (), {})
    other = type("Handler", (), {})
    for klass, kept in ((kind, {}), (kind, None), (other, {0: tensor()}), (kind, {0: tensor(), 1: tensor()})):
        stage.keep(klass()).fp8_tensor_object_map = kept
    reading = look("te.cpu_offload")
    path = "SynchronizedGroupOffloadHandler.fp8_tensor_object_map"
    assert (reading.places, reading.entries) == ([(path, 2 * NBYTES)], 2)


def test_symmetric_memory_is_released_by_the_library_s_own_function(stage: Stage) -> None:
    (entry,) = (entry for entry in TRANSFORMER_ENGINE if entry.name == "te.symmetric_memory")
    assert entry.clear_all is release_symmetric_memory
    released: list[int] = []
    for name in ("distributed", "importer"):
        stage.module(f"{PYTORCH}.{name}", release_symm_mem_pool=lambda: released.append(1))
    release_symmetric_memory()
    assert released == [1]


def test_a_version_without_that_function_says_so(stage: Stage) -> None:
    stage.module(PYTORCH)
    with pytest.raises(RuntimeError, match="has no release_symm_mem_pool"):
        release_symmetric_memory()
