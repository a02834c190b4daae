"""What PyTorch itself keeps next to the caching allocator. Source: torch 2.8 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from memtriage.catalogue.entry import Holder, Place, Site
from memtriage.catalogue.finders import ValueSlot, attribute, container, containers, variables
from memtriage.catalogue.scene import Scene
from memtriage.catalogue.situation import cudagraph_managers
from memtriage.observe.classes import instance_dict, name_of
from memtriage.observe.cuda import initialized
from memtriage.observe.frames import running_frames
from memtriage.observe.host import pinned

_OFFLOAD: Final = "torch._functorch._activation_offloading"
_SYMMETRIC: Final = "torch.distributed._symmetric_memory"
_FSDP: Final = "torch.distributed.fsdp"
CUBLAS_WORKSPACES: Final = "torch.cublas_workspaces"


def _torch() -> Any:
    return sys.modules["torch"]


def _cublas(scene: Scene) -> Iterator[Place]:
    """Its blocks are recognized in the allocator's segments, by the account; here they have no size."""
    if initialized() and hasattr(_torch()._C, "_cuda_clearCublasWorkspaces"):
        yield Place("the workspaces of this process's cuBLAS handles")


def _cudagraph_trees(scene: Scene) -> Iterator[Place]:
    managers = cudagraph_managers()
    if managers:
        yield Place("torch._inductor.cudagraph_trees, this thread", entries=len(managers))


def _reset_cudagraph_trees() -> None:
    """Compiled code first: what outlives its graphs fails with "Running CUDAGraph after shutdown"."""
    if "torch._dynamo" in sys.modules:
        _reset_dynamo()
    sys.modules["torch._inductor.cudagraph_trees"].reset_cudagraph_trees()


def _dynamo(scene: Scene) -> Iterator[Place]:
    made = getattr(sys.modules.get("torch._dynamo.convert_frame"), "output_codes", None)
    compiled = getattr(made, "seen_ids", None)
    if compiled:
        yield Place("code compiled by torch.compile", entries=len(compiled))


def _reset_dynamo() -> None:
    sys.modules["torch._dynamo"].reset()


_STATES: Final = ("all_gather_state", "reduce_scatter_state", "_all_reduce_state")


def _fsdp_states(scene: Scene) -> Iterator[Place]:
    """One attribute each, but reduce-scatter states, which are a list in newer versions."""
    wanted = ("FSDPCommContext", "FSDPParamGroup")
    for owner in scene.instances(lambda kind: name_of(kind) in wanted):
        own = instance_dict(owner) or {}
        for name in _STATES:
            if own.get(name) is not None:
                slot = ValueSlot(own, name)
                yield Place(f"{name_of(type(owner))}.{name}", slot.values, slot.empty)
        states = own.get("reduce_scatter_states")
        if states:
            yield container(f"{name_of(type(owner))}.reduce_scatter_states", states)


def _pinned_pool(scene: Scene) -> Iterator[Place]:
    """`_pool_clear` knows what else belongs to the pool, in versions that have it."""
    tidy = next((function for _, function, _ in variables(_OFFLOAD, "_pool_clear")), None)
    for path, pool, _ in variables(_OFFLOAD, "_pinned_pool"):
        if pool:
            place = container(path, pool)
            place.clear = tidy or place.clear
            yield place
    for path, registry, _ in variables(_OFFLOAD, "_wait_registry"):
        if registry:
            yield container(path, registry)


def _pinned_cache(scene: Scene) -> Iterator[Place]:
    stats = pinned()
    if stats is None or not stats.owned or stats.cached == 0:
        return
    # Before torch 2.13 it cannot be seen what of it is free.
    yield Place("the cache of torch's pinned memory", other={"host": stats.cached} if stats.cached else {})


def _empty_host_cache() -> None:
    torch = _torch()
    public = getattr(torch.accelerator, "empty_host_cache", None)  # 2.12.1 and newer
    (public or torch._C._host_emptyCache)()


def _conv_benchmark(scene: Scene) -> Iterator[Place]:
    cudnn = sys.modules.get("torch.backends.cudnn")
    if initialized() and getattr(cudnn, "benchmark", False):
        yield Place("torch.backends.cudnn.benchmark is on")


def _async_collectives(scene: Scene) -> Iterator[Place]:
    waiting = [
        subclass
        for subclass in scene.subclasses("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
        if not attribute(subclass, "completed")
    ]
    if waiting:
        owners = [instance_dict(result) or {} for result in waiting]
        yield Place(
            "results of collectives without a wait",
            lambda: [own.get("elem") for own in owners],
            entries=len(owners),
        )


def _nccl(scene: Scene) -> Iterator[Place]:
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    groups = getattr(world, "pg_map", None) or {}
    of_nccl = sum("nccl" in str(entry[0]) for entry in groups.values())
    if of_nccl:
        yield Place("process groups with NCCL", entries=of_nccl)


def _do_bench(scene: Scene) -> Iterator[Place]:
    """The buffer is a local variable of the function while it runs."""
    if "triton.testing" not in sys.modules:
        return
    for _, frame in running_frames(lambda file: False):
        name = frame.f_code.co_name
        if name.startswith("do_bench") and frame.f_globals.get("__name__") == "triton.testing":
            yield Place(f"{name}() is running")


def _entry(name: str, **words: Any) -> Holder:
    return Holder(
        name=name, library="PyTorch", package=words.pop("package", "torch"), **words, distributions=("torch",)
    )


PYTORCH: Final[tuple[Holder, ...]] = (
    _entry(
        CUBLAS_WORKSPACES,
        kind="workspace",
        symbol="cuBLAS and cuBLASLt workspaces in CUDABlas' handle pool",
        holds="a workspace for each (handle, stream): 32 MiB on Hopper, 8.1 MiB elsewhere; the threads of "
        "autograd have handles of their own. empty_cache() leaves them",
        find=_cublas,
        clears="torch._C._cuda_clearCublasWorkspaces() (private)",
        clear_all=lambda: _torch()._C._cuda_clearCublasWorkspaces(),
        refills="at the next product; from torch 2.15 on they are kept only with "
        "TORCH_CUBLAS_WORKSPACE_CACHE=1",
        forbidden=("graphs", "backward"),
    ),
    _entry(
        "torch.cudagraph_trees",
        package="torch._inductor.cudagraph_trees",
        kind="graphs",
        symbol="torch._inductor.cudagraph_trees.local.tree_manager_containers",
        holds="private pools and static outputs of compiled CUDA graphs",
        find=_cudagraph_trees,
        clears="torch._dynamo.reset(), then torch._inductor.cudagraph_trees.reset_cudagraph_trees(), in the "
        "thread that owns them",
        clear_all=_reset_cudagraph_trees,
        refills="by compiling everything again; graphs are captured after two eager runs each",
        policy="on request",
        why="everything is compiled and captured again, and only the thread that made them can release them",
        forbidden=("backward",),
    ),
    _entry(
        "torch.dynamo",
        package="torch._dynamo",
        kind="graphs",
        symbol="guards and constants on code objects",
        holds="tensors and modules that compiled code was specialized on",
        find=_dynamo,
        clears="torch._dynamo.reset(), then gc.collect(); from torch 2.11 on it resets cudagraph trees too",
        clear_all=_reset_dynamo,
        refills="by compiling everything again, which takes minutes",
        policy="on request",
        why="everything is compiled again",
        forbidden=("backward",),
    ),
    _entry(
        "torch.symmetric_memory",
        package=_SYMMETRIC,
        kind="communication",
        symbol="torch.distributed._symmetric_memory._group_name_to_workspace_tensor, _symm_mem_pools",
        holds="workspaces by group, and memory pools",
        find=containers(_SYMMETRIC, "_group_name_to_workspace_tensor", "_symm_mem_pools"),
        clears=".clear() of both",
        refills="at the next use, with a rendezvous of all ranks",
        policy="on request",
        why="peers may be using it, and every rank must release it",
        forbidden=("graphs", "backward"),
        owner="communication buffer",
    ),
    _entry(
        "fsdp2.communication",
        package=_FSDP,
        kind="communication",
        symbol="FSDPCommContext.all_gather_state, reduce_scatter_states (older: reduce_scatter_state); "
        "FSDPParamGroup._all_reduce_state",
        holds="the buffers of the last all-gather and reduce-scatter, until the next",
        find=_fsdp_states,
        clears="set to None, or .clear(), when the device has been synchronized, between steps",
        refills="at the next collective",
        forbidden=("graphs", "backward"),
        owner="communication buffer",
        sites=(
            Site(
                "fsdp/_fully_shard/_fsdp_collectives.py", frozenset({"foreach_all_gather", "foreach_reduce"})
            ),
        ),
    ),
    _entry(
        "torch.async_collectives",
        package="torch.distributed._functional_collectives",
        kind="communication",
        symbol="AsyncCollectiveTensor without wait_tensor()",
        holds="results and inputs of functional collectives (seen with float8, compile and tensor "
        "parallelism)",
        find=_async_collectives,
        policy="never",
        why="the program has yet to wait for them",
        owner="communication buffer",
    ),
    _entry(
        "torch.nccl",
        package="torch.distributed",
        kind="communication",
        symbol="NCCL communicators of process groups",
        holds="buffers outside torch's statistics: some hundred MiB per communicator, gigabytes per rank "
        "with many",
        find=_nccl,
        clears="destroy the groups, or ncclCommSuspend (NCCL 2.29.7 and newer)",
        policy="never",
        why="collectives may be alive or captured, and every rank must take part",
        refills="at the next collective",
    ),
    _entry(
        "torch.offload_pool",
        package=_OFFLOAD,
        kind="host",
        symbol="torch._functorch._activation_offloading.offload_ops._pinned_pool, _wait_registry",
        holds="pinned host memory of activation offloading, by (elements, dtype), and events",
        find=_pinned_pool,
        clears=".clear() between steps, then the pinned cache is emptied",
        refills="in the next forward",
        forbidden=("graphs", "backward"),
    ),
    _entry(
        "torch.pinned_cache",
        kind="host",
        symbol="torch's host allocator",
        holds="freed pinned blocks, in sizes rounded up to powers of two",
        find=_pinned_cache,
        clears="torch.accelerator.empty_host_cache() (torch 2.12.1 and newer), torch._C._host_emptyCache()",
        clear_all=_empty_host_cache,
        refills="at the next pinned allocation",
        policy="on request",
        why="memory is pinned slowly: a program that pins the same sizes again waits for it in each phase",
        forbidden=(),
        after_collection=True,
    ),
    _entry(
        "torch.conv_benchmark",
        kind="workspace",
        symbol="torch.backends.cudnn.benchmark",
        holds="workspaces while convolutions are tuned; they raise the peak, and are freed then",
        find=_conv_benchmark,
        clears="torch._C._cudnn_set_conv_benchmark_empty_cache(True) frees them after tuning",
        policy="never",
        why="it is a setting: nothing is held between calls",
        refills="for each new shape",
    ),
    Holder(
        name="triton.do_bench",
        library="Triton",
        package="triton",
        distributions=("triton", "pytorch-triton"),
        kind="workspace",
        symbol="triton.testing.do_bench, autotuner",
        holds="a buffer of 256 MB that flushes the L2 cache, while kernels are tuned",
        find=_do_bench,
        policy="never",
        why="freed when tuning ends",
        refills="for each key that is tuned",
    ),
)
