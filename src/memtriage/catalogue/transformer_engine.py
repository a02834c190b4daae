"""What TransformerEngine 2.x keeps. Source: TransformerEngine d0067d0d (2.20.0.dev0), its tags since 2.0."""

from __future__ import annotations

from typing import Any, Final

from memtriage.catalogue.entry import Holder, Site, Span
from memtriage.catalogue.finders import containers, emptied, lru_caches, several
from memtriage.catalogue.te_structures import (
    PACKAGE,
    adam_remainders,
    columnwise,
    fp8_workspaces,
    global_state,
    loaded_variables,
    marked,
    module_state,
    offload_buffers,
    permutation_workspace,
    release_symmetric_memory,
    tensor_objects,
    transposes,
)

_ON_OBJECTS: Final = ""
"""Looked for without the package: the program's own objects tell, and copies of the library have them too."""
_DISTRIBUTIONS: Final = (
    PACKAGE,
    "transformer_engine_torch",
    "transformer_engine_cu13",
    "transformer_engine_cu12",
)


def _made_in(*functions: str) -> tuple[Site, ...]:
    return (Site(f"{PACKAGE}/", frozenset(functions)),)


def _entry(name: str, **words: Any) -> Holder:
    return Holder(
        name=f"te.{name}",
        library="TransformerEngine",
        package=words.pop("package", PACKAGE),
        distributions=_DISTRIBUTIONS,
        **words,
    )


TRANSFORMER_ENGINE: Final[tuple[Holder, ...]] = (
    _entry(
        "tensor_objects",
        package=_ON_OBJECTS,
        kind="activations",
        symbol="ctx.tensor_objects of autograd nodes",
        holds="quantized tensors that backward has restored and not released (#1935); they live until the "
        "node dies, with checkpointing those of all layers at once",
        find=tensor_objects,
        clears="tensor_objects = None on nodes whose backward has run and kept no graph; EmptyAfterRestore "
        "prevents it",
        refills="in each forward",
        spans=(
            Span((2, 0), (2, 1), "Linear, LayerNormLinear, LayerNormMLP"),
            Span((2, 0), (2, 14), "ops/fuser.py OperationFuser"),
            Span((2, 0), (2, 15), "FusedAttnFunc, context_parallel.py, GroupedLinear"),
        ),
        owner="autograd context",
    ),
    _entry(
        "fp8_workspaces",
        package=_ON_OBJECTS,
        kind="weight copies",
        symbol="_fp8_workspaces of each module",
        holds="quantized copies of weights, by row and by column: about 2 bytes per parameter; made where "
        "is_first_microbatch is given",
        find=fp8_workspaces,
        clears=".clear() of each dict",
        refills="lazily, in the next forward",
        forbidden=("graphs", "backward"),
        sites=_made_in("get_weight_workspace"),
    ),
    _entry(
        "dummy_wgrads",
        kind="workspace",
        symbol="module.base._dummy_wgrads",
        holds="one buffer of a weight's size for each (shape, dtype), with fuse_wgrad_accumulation",
        find=containers(PACKAGE, "_dummy_wgrads"),
        clears=".clear()",
        refills="in the next backward",
        forbidden=("graphs", "backward"),
        sites=_made_in("get_dummy_wgrad"),
    ),
    _entry(
        "cublas_workspace",
        kind="workspace",
        symbol="cpp_extensions.gemm.get_cublas_workspace; up to 2.9 module.base._cublas_workspace, "
        "_multi_stream_cublas_workspace",
        holds="32 MiB + 1 KiB from Hopper on; times streams where grouped, times 3 with userbuffers",
        find=several(
            lru_caches(PACKAGE, "get_cublas_workspace"),
            emptied(PACKAGE, "_cublas_workspace"),
            containers(PACKAGE, "_multi_stream_cublas_workspace"),
        ),
        clears=".cache_clear(); up to 2.9 _cublas_workspace = None, _multi_stream_cublas_workspace.clear()",
        refills="at the next product",
        forbidden=("graphs", "backward"),
        sites=_made_in("get_cublas_workspace", "get_multi_stream_cublas_workspace"),
    ),
    _entry(
        "gemm_tables",
        kind="workspace",
        symbol="cpp_extensions.gemm._get_fp32_ones_tensor, _get_fp32_zeros_tensor, "
        "_get_grouped_gemm_setup_workspace, _get_grouped_cublas_workspace",
        holds="small constants, and 3 x 32 MiB for grouped products",
        find=lru_caches(
            PACKAGE,
            "_get_fp32_ones_tensor",
            "_get_fp32_zeros_tensor",
            "_get_grouped_gemm_setup_workspace",
            "_get_grouped_cublas_workspace",
        ),
        clears=".cache_clear()",
        refills="at the next grouped product",
        forbidden=("graphs", "backward"),
        sites=_made_in(
            "_get_fp32_ones_tensor",
            "_get_fp32_zeros_tensor",
            "_get_grouped_gemm_setup_workspace",
            "_get_grouped_cublas_workspace",
        ),
    ),
    _entry(
        "cached_ones",
        kind="lookup table",
        symbol="utils.get_cached_ones_tensor, _empty_tensor",
        holds="small tensors, each of which may pin a segment",
        find=lru_caches(PACKAGE, "get_cached_ones_tensor", "_empty_tensor"),
        clears=".cache_clear()",
        refills="at the next use",
        sites=_made_in("get_cached_ones_tensor", "_empty_tensor"),
    ),
    _entry(
        "fp4_tables",
        kind="lookup table",
        symbol="tensor.nvfp4_tensor.get_rht_matrix, nvfp4_tensor_storage._fp4_e2m1_vals",
        holds="tiny tables of the FP4 format, each of which may pin a segment",
        find=lru_caches(PACKAGE, "get_rht_matrix", "_fp4_e2m1_vals"),
        clears=".cache_clear()",
        refills="at the next use",
        sites=_made_in("get_rht_matrix", "_fp4_e2m1_vals"),
    ),
    _entry(
        "causal_mask",
        kind="lookup table",
        symbol="attention softmax._default_causal_mask",
        holds="a boolean mask of sq x sk for each shape that was ever seen: no bound",
        find=containers(PACKAGE, "_default_causal_mask"),
        clears=".clear()",
        refills="one mask for each new shape",
        sites=_made_in("_get_default_causal_mask"),
    ),
    _entry(
        "cu_seqlens",
        kind="lookup table",
        symbol="attention utils._cu_seqlens_cache; context_parallel._cu_seqlens_info_with_cp_cache, "
        "_seq_chunk_ids_cache_for_reordering_before_attn, _seq_chunk_ids_cache_for_reordering_after_attn, "
        "_softmax_offset_chunk_ids_cache",
        holds="small index tensors for each sequence length that was ever seen: no bound",
        find=containers(
            PACKAGE,
            "_cu_seqlens_cache",
            "_cu_seqlens_info_with_cp_cache",
            "_seq_chunk_ids_cache_for_reordering_before_attn",
            "_seq_chunk_ids_cache_for_reordering_after_attn",
            "_softmax_offset_chunk_ids_cache",
        ),
        clears=".clear()",
        refills="one for each new sequence length",
        sites=_made_in("get_full_cu_seqlens"),
    ),
    _entry(
        "flex_attention",
        kind="workspace",
        symbol="attention flex_attention._cudnn_score_mod_handles, _graph_cache",
        holds="cuDNN handles and graphs; their memory is outside torch's allocator",
        find=containers(PACKAGE, "_cudnn_score_mod_handles", "_graph_cache"),
        clears=".clear()",
        refills="graphs are built again at the next call, which is slow",
        policy="on request",
        why="cuDNN graphs take long to build again",
        forbidden=("graphs", "backward"),
    ),
    _entry(
        "permutation_workspace",
        kind="workspace",
        symbol="permutation._moe_permute_index_map_workspace, _moe_permute_index_map_max_expanded_token_num",
        holds="the workspace for sorting tokens by expert; grows to the most tokens ever seen",
        find=permutation_workspace,
        clears="the workspace = [] (or None), its maximum = 0",
        refills="at the next permutation",
        forbidden=("graphs", "backward"),
    ),
    _entry(
        "float8_transpose",
        package=_ON_OBJECTS,
        kind="weight copies",
        symbol="_transpose of Float8Tensor parameters",
        holds="the transposed copy of a quantized weight: 1 byte per parameter",
        find=transposes,
        clears="remove_caches() (or update_usage(columnwise_usage=False)) of the parameter",
        refills="made again from the weight before the next backward",
        forbidden=("graphs", "backward"),
        owner="known cache",
        sites=_made_in("_create_transpose"),
    ),
    _entry(
        "columnwise_data",
        package=_ON_OBJECTS,
        kind="model state",
        symbol="_columnwise_data of quantized parameters",
        holds="the columnwise copy of a quantized weight: 1 byte per parameter",
        find=columnwise,
        policy="never",
        why="block-scaled formats cannot make it again from the rowwise copy before the optimizer steps",
        refills="when the optimizer writes the weight",
    ),
    _entry(
        "symmetric_memory",
        kind="communication",
        symbol="distributed.symmetric_mem_cache, _SYMM_MEM_POOL",
        holds="symmetric memory and its pool",
        find=loaded_variables("symmetric_mem_cache", "_SYMM_MEM_POOL"),
        clears="release_symm_mem_pool()",
        clear_all=release_symmetric_memory,
        refills="at the next collective, with a rendezvous of all ranks",
        policy="on request",
        why="peers may be using it, and every rank must release it",
        forbidden=("graphs", "backward"),
    ),
    _entry(
        "userbuffers",
        kind="communication",
        symbol="module.base._ub_communicators",
        holds="userbuffers, allocated with cudaMalloc outside torch",
        find=loaded_variables("_ub_communicators"),
        clears="destroy_ub()",
        policy="never",
        why="they must be registered again with initialize_ub() on every rank",
        refills="by initialize_ub()",
    ),
    _entry(
        "global_state",
        kind="model state",
        symbol="FP8GlobalStateManager: quantization_state or class attributes (amax and scale buffers, "
        "fp8_tensors_recompute_buffer, skip_fp8_weight_update_tensor)",
        holds="histories and scales of delayed scaling, and the stash for recomputation",
        find=global_state,
        clears="FP8GlobalStateManager.reset()",
        policy="never",
        why="it unregisters the modules: they must be registered again, and histories of scales are lost",
        refills="as modules register",
        owner="buffer",
    ),
    _entry(
        "fp8_meta",
        package=_ON_OBJECTS,
        kind="model state",
        symbol="fp8_meta['scaling_fwd'], fp8_meta['scaling_bwd'] and quantizers of each module",
        holds="amax histories and scales, fp32, small",
        find=module_state,
        policy="never",
        why="it is model state",
        owner="buffer",
    ),
    _entry(
        "adam_remainders",
        package=_ON_OBJECTS,
        kind="model state",
        symbol="int16 state[*]['master_param'] of FusedAdam (store_param_remainders)",
        holds="the low 16 bits of fp32 master weights, whose high bits are the bf16 parameters; often "
        "mistaken for scaling factors",
        find=adam_remainders,
        policy="never",
        why="it is optimizer state: park it instead",
        owner="optimizer state",
    ),
    _entry(
        "cpu_offload",
        kind="activations",
        symbol="cpu_offload.OFFLOAD_SYNCHRONIZER; v1 fp8_tensor_object_map",
        holds="double buffers of activation offloading on the GPU",
        find=offload_buffers,
        policy="never",
        why="TransformerEngine has no action for it; freed with the offloading context",
    ),
    _entry(
        "do_not_clear",
        kind="activations",
        symbol="_do_not_clear of tensors",
        holds="nothing itself; clear_tensor_data() skips tensors with this flag, so their memory stays",
        find=marked,
        policy="never",
        why="it is a flag on the program's own tensors",
        keeps=False,
    ),
)
