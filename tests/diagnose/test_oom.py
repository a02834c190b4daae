"""Out of memory: what the message says, which part of training it hit, and the advice that follows."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.oom import (
    ADVICE,
    Cause,
    FrameState,
    Moment,
    OomFields,
    Phase,
    cause_of,
    describe,
    factor_request,
    is_out_of_memory,
    moment_from_frames,
    read_message,
)
from memtriage.model import Finding
from memtriage.model.playbook import PLAYBOOK

MIB = 1024**2
GIB = 1024**3
RUNTIME = ("RuntimeError", "Exception", "BaseException", "object")

FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of "
    "79.18 GiB of which 1.08 GiB is free. Including non-PyTorch memory, this process has 78.09 GiB memory "
    "in use. Of the allocated memory 75.31 GiB is allocated by PyTorch, and 1.83 GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
    "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
IN_CONTAINER = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 17.37 GiB. GPU 0 has a total capacity "
    "of 31.50 GiB of which 9.48 GiB is free. Including non-PyTorch memory, this process has 0 bytes memory "
    "in use. Of the allocated memory 20.91 GiB is allocated by PyTorch, and 833.28 MiB is reserved by "
    "PyTorch but unallocated."
)
HOLES = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total "
    "capacty of 6.00 GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by "
    "PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory Management "
    "and PYTORCH_CUDA_ALLOC_CONF"
)
SPILLED = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total "
    "capacity of 8.00 GiB of which 0 bytes is free. Including non-PyTorch memory, this process has "
    "17179869184.00 GiB memory in use. Of the allocated memory 13.67 GiB is allocated by PyTorch, and 9.62 "
    "MiB is reserved by PyTorch but unallocated."
)
GRAPHS = (
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 270.00 MiB. GPU 0 has a total "
    "capacity of 21.67 GiB of which 255.75 MiB is free. Process 2109 has 344.00 MiB memory in use. Process "
    "1448259 has 21.07 GiB memory in use. Of the allocated memory 20.08 GiB is allocated by PyTorch, with "
    "328.00 MiB allocated in private pools (e.g., CUDA Graphs), and 56.49 MiB is reserved by PyTorch but "
    "unallocated."
)
OTHERS = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 4.50 GiB. GPU 0 has a total capacity of "
    "15.98 GiB of which 1.40 GiB is free. Of the allocated memory 1.26 GiB is allocated by PyTorch, and "
    "152.50 MiB is reserved by PyTorch but unallocated."
)
CAPPED = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of "
    "255.69 GiB of which 252.82 GiB is free. 1.20 GiB allowed; Of the allocated memory 1.14 GiB is "
    "allocated by PyTorch, with 17.00 MiB allocated in private pools (e.g., HIP Graphs), and 18.63 MiB is "
    "reserved by PyTorch but unallocated."
)
REFUSED = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity of "
    "287.98 GiB of which 203.49 GiB is free. Of the allocated memory 68.63 GiB is allocated by PyTorch, "
    "and 14.93 GiB is reserved by PyTorch but unallocated."
)
XPU = (
    "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of "
    "15.11 GiB. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by "
    "PyTorch but unallocated. Please use `empty_cache` to release all unoccupied cached memory."
)
MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 12.74 GB, other allocations: 4.39 GB, max "
    "allowed: 18.13 GB). Tried to allocate 1.02 GB on private pool. Use "
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may cause system "
    "failure)."
)
ASYNC = (
    "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
    "Currently allocated     : 9.43 GiB\nRequested               : 640.00 MiB\n"
    "Device limit            : 11.59 GiB\nFree (according to CUDA): 7.12 MiB\n"
    "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB"
)
CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 116813856768 bytes. Error code 12 (Cannot allocate memory)"
)
WINDOWS = (
    r"RuntimeError: [enforce fail at C:\actions-runner\_work\pytorch\pytorch\builder\windows\pytorch\c10\core"
    r"\impl\alloc_cpu.cpp:81] data. DefaultCPUAllocator: not enough memory: you tried to allocate 1073741824 "
    "bytes."
)
NUMPY = (
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 PiB for an array with shape "
    "(1125899906842624,) and data type float64"
)
WORKER = (
    "RuntimeError: Caught MemoryError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
    'last):\n  File "data.py", line 7, in __getitem__\nMemoryError'
)
SHM = (
    "RuntimeError: DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible that "
    "dataloader's workers are out of shared memory. Please try to raise your shared memory limit"
)
BARE = (
    "RuntimeError: CUDA error: out of memory\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)
CUBLAS = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


# Is it one?


@pytest.mark.parametrize(
    "text",
    [
        *(
            FULL,
            IN_CONTAINER,
            HOLES,
            GRAPHS,
            CAPPED,
            XPU,
            MPS,
            ASYNC,
            CPU,
            WINDOWS,
            WORKER,
            SHM,
            BARE,
            CUBLAS,
        ),
        "Out of memory. Tried to allocate 2.00 GiB.",
        "HIP error: out of memory",
        "CUDA driver error: out of memory",
        "UR_RESULT_ERROR_OUT_OF_RESOURCES",
        "Invalid buffer size: 9.47 GiB",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, please',
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "host:3018451:3018451 [0] enqueue.cc:1085 NCCL WARN Cuda failure 'out of memory'",
        "NCCL error in: ProcessGroupNCCL.cpp:2021, unhandled cuda error\nCuda failure 2 'out of memory'",
        "Failed to CUDA calloc async 608 bytes",
        "$ Torch: posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0",
        "std::bad_alloc",
        "[Errno 12] Cannot allocate memory",
        "unable to mmap 1048576 bytes from file </torch_1_2_3>: Cannot allocate memory (12)",
        "Unexpected bus error encountered in worker. Possibly insufficient shared memory (shm).",
        "unable to write to file </torch_739_144252761_4>: No space left on device (28)",
        NUMPY,
    ],
)
def test_texts_of_a_failed_allocation(text: str) -> None:
    assert is_out_of_memory(RUNTIME, text)


@pytest.mark.parametrize(
    "names",
    [
        ("OutOfMemoryError", *RUNTIME),
        ("torch.OutOfMemoryError", *RUNTIME),
        ("torch.cuda.OutOfMemoryError",),
        ("MemoryError", "Exception"),
        ("numpy._core._exceptions._ArrayMemoryError", "MemoryError", "Exception"),
        ("OutOfTokens", "MemoryError", "ValueError"),
    ],
)
def test_classes_that_mean_it_whatever_they_say(names: tuple[str, ...]) -> None:
    assert is_out_of_memory(names, "")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("ValueError", "Exception"), "this would run out of memory: CUDA out of memory expected"),
        (("KeyError", "LookupError", "Exception"), "std::bad_alloc"),
        (("ImportError", "Exception"), "libgomp.so.1: cannot allocate memory in static TLS block"),
        (RUNTIME, "mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)"),
        (RUNTIME, "memory format option is only supported by strided tensors"),
        (RUNTIME, "DataLoader worker (pid 19597) is killed by signal: Killed."),
        (
            RUNTIME,
            "unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)",
        ),
        (
            RUNTIME,
            '!block->expandable_segment_ INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":9',
        ),
        (RUNTIME, "CUDA error: an illegal memory access was encountered"),
        (
            ("OutOfResources", "Exception"),
            "out of resource: shared memory, Required: 262144, Hardware limit: 101376",
        ),
        (("OSError", "Exception"), "[Errno 28] No space left on device: 'checkpoint.pt'"),
    ],
)
def test_what_only_mentions_memory_is_not_it(names: tuple[str, ...], text: str) -> None:
    assert not is_out_of_memory(names, text)


# What the message says


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        pytest.param(
            FULL,
            OomFields(
                device="cuda:0",
                requested=2104533975,
                total=85018877624,
                free=1159641170,
                allocated=80863496765,
                reserved_unallocated=1964947538,
                process_total=83848499036,
            ),
            id="full",
        ),
        pytest.param(
            HOLES,
            OomFields(
                device="cuda:0",
                requested=1825361101,
                total=6442450944,
                free=0,
                allocated=3146063544,
                reserved_unallocated=2469606195,
            ),
            id="2.1-capacty",
        ),
        pytest.param(
            GRAPHS,
            OomFields(
                device="cuda:0",
                requested=283115520,
                total=23267985326,
                free=268173312,
                allocated=21560735826,
                private_pools=343932928,
                reserved_unallocated=59234058,
            ),
            id="private-pools-and-processes",
        ),
        pytest.param(
            CAPPED,
            OomFields(
                device="cuda:0",
                requested=79691776,
                total=274545046979,
                free=271463407944,
                allowed=1288490189,
                allocated=1224065679,
                private_pools=17825792,
                reserved_unallocated=19534971,
            ),
            id="allowed",
        ),
        pytest.param(
            XPU,
            OomFields(
                device="xpu:0", requested=8589934592, total=16224238961, allocated=0, reserved_unallocated=0
            ),
            id="xpu-without-free",
        ),
        pytest.param(
            MPS,
            OomFields(device="mps", requested=1095216660, allocated=13679470838, allowed=19466939269),
            id="mps",
        ),
        pytest.param(
            ASYNC,
            OomFields(
                device="cuda:0", requested=640 * MIB, total=12444667740, free=7465861, allocated=10125385400
            ),
            id="cudaMallocAsync",
        ),
        pytest.param(CPU, OomFields(device="cpu", requested=116813856768), id="cpu"),
        pytest.param(WINDOWS, OomFields(device="cpu", requested=GIB), id="windows"),
        pytest.param(NUMPY, OomFields(device="host", requested=8 * 1024**5), id="numpy"),
        pytest.param("MemoryError", OomFields(device="host"), id="MemoryError"),
        pytest.param("OSError: [Errno 12] Cannot allocate memory", OomFields(device="host"), id="ENOMEM"),
        pytest.param(SHM, OomFields(device="host"), id="bus-error"),
        pytest.param(WORKER, OomFields(device="host"), id="worker"),
        pytest.param(BARE, OomFields(), id="bare"),
        pytest.param("CUDA out of memory. Tried to allocate more than 1EB memory.", OomFields(), id="1EB"),
        pytest.param("", OomFields(), id="nothing"),
    ],
)
def test_the_figures_of_a_message(text: str, fields: OomFields) -> None:
    assert read_message(text) == fields


@pytest.mark.parametrize("text", [IN_CONTAINER, SPILLED])
def test_unknown_use_of_the_process_is_no_number(text: str) -> None:
    assert "this process has" in text
    assert read_message(text).process_total is None


def test_sums_exist_only_where_their_parts_do() -> None:
    fields = read_message(FULL)
    assert fields.reserved == 80863496765 + 1964947538
    assert fields.outside == 85018877624 - 1159641170 - fields.reserved
    assert read_message(XPU).outside is None
    assert read_message(SPILLED).outside is None, "allocated beyond the device"
    assert read_message(CPU).reserved is None


@given(st.integers(0, len(GRAPHS)))
def test_a_cut_message_gives_the_same_figures_or_none(end: int) -> None:
    whole, cut = read_message(GRAPHS), read_message(GRAPHS[:end])
    for name in whole.__slots__:
        assert getattr(cut, name) in (None, getattr(whole, name))


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    assert read_message(text).requested is None or "ocate" in text


# The request as a product


def test_the_logits_of_a_real_report() -> None:
    asked = read_message(IN_CONTAINER).requested
    assert asked is not None
    shapes = {"hidden": 4096, "tokens": 30688, "vocabulary": 151936}
    assert factor_request(asked, shapes) == "17.37 GiB = 30,688 x 151,936 x 4 bytes (tokens x vocabulary)"


SIZES = st.dictionaries(
    st.sampled_from(["batch", "sequence", "heads", "hidden"]), st.integers(2, 5000), min_size=1
)


@given(SIZES, st.sampled_from([1, 2, 4, 8]))
def test_an_exact_product_is_always_found(shapes: dict[str, int], itemsize: int) -> None:
    nbytes = itemsize
    for count in shapes.values():
        nbytes *= count
    found = factor_request(nbytes, shapes, [itemsize])
    if nbytes in (2 * MIB, 20 * MIB):
        assert found is None
        return
    assert found is not None
    assert product_of(found) == nbytes


def product_of(text: str) -> int:
    product = 1
    for factor in re.split(r" x ", text.partition(" = ")[2].partition(" byte")[0]):
        product *= int(factor.replace(",", ""))
    return product


@pytest.mark.parametrize(
    ("request_size", "found"),
    [
        pytest.param(24 * MIB, "24.00 MiB = 3,000 x 2,000 x 4 bytes (a x b)", id="rounded-to-2MiB"),
        pytest.param(26 * MIB, None, id="another-size"),
        pytest.param(20 * MIB, None, id="20MiB-says-nothing"),
        pytest.param(24_000_001, None, id="exact-size-of-something-else"),
    ],
)
def test_rounding_by_the_allocator(request_size: int, found: str | None) -> None:
    assert factor_request(request_size, {"a": 3000, "b": 2000}, [4]) == found


def test_scores_of_attention_use_the_length_twice() -> None:
    shapes = {"batch": 8, "heads": 16, "sequence": 4096}
    assert factor_request(8 * 16 * 4096 * 4096 * 4, shapes) == (
        "8.00 GiB = 8 x 16 x 4,096 x 4,096 x 4 bytes (batch x heads x sequence x sequence)"
    )


# When it happened

TORCH = "/venv/lib/python3.11/site-packages/torch"
MODULE_CALL = [
    (f"{TORCH}/nn/modules/module.py", "_call_impl"),
    (f"{TORCH}/nn/modules/module.py", "_wrapped_call_impl"),
]
BACKWARD = [
    (f"{TORCH}/autograd/graph.py", "_engine_run_backward"),
    (f"{TORCH}/autograd/__init__.py", "backward"),
    (f"{TORCH}/_tensor.py", "backward"),
]
STEP = [
    (f"{TORCH}/optim/adam.py", "_init_group"),
    (f"{TORCH}/optim/adam.py", "step"),
    (f"{TORCH}/optim/optimizer.py", "wrapper"),
]
NO_GRAD = (f"{TORCH}/utils/_contextlib.py", "decorate_context")
FORWARD = ("train.py", "forward")
MAIN = ("train.py", "<module>")
BEGUN = FrameState(training_begun=True)
NOT_BEGUN = FrameState(training_begun=False)


@pytest.mark.parametrize(
    ("frames", "state", "phase"),
    [
        pytest.param([FORWARD, *MODULE_CALL, MAIN], NOT_BEGUN, "forward", id="first-forward"),
        pytest.param([("train.py", "build"), MAIN], NOT_BEGUN, "setup", id="building"),
        pytest.param(
            [("train.py", "build"), ("train.py", "train")], NOT_BEGUN, "setup", id="building-in-train"
        ),
        pytest.param([("train.py", "build"), MAIN], BEGUN, "forward", id="between-steps"),
        pytest.param([*BACKWARD, MAIN], BEGUN, "backward", id="backward"),
        pytest.param(
            [FORWARD, *MODULE_CALL, (f"{TORCH}/utils/checkpoint.py", "recompute_fn"), *BACKWARD, MAIN],
            FrameState(training_begun=True, grad_enabled=True),
            "backward",
            id="recomputation-in-backward",
        ),
        pytest.param(
            [(f"{TORCH}/_tensor.py", "__deepcopy__"), MAIN], NOT_BEGUN, "setup", id="copy-of-a-tensor"
        ),
        pytest.param([*STEP, MAIN], BEGUN, "optimizer", id="optimizer"),
        pytest.param(
            [*STEP, ("train.py", "hook"), *BACKWARD, MAIN], BEGUN, "optimizer", id="step-in-backward"
        ),
        pytest.param(
            [
                FORWARD,
                *MODULE_CALL,
                ("train.py", "closure"),
                NO_GRAD,
                (f"{TORCH}/optim/lbfgs.py", "step"),
                MAIN,
            ],
            BEGUN,
            "forward",
            id="closure-of-lbfgs",
        ),
        pytest.param(
            [*BACKWARD, ("train.py", "closure"), *STEP, MAIN], BEGUN, "backward", id="backward-in-step"
        ),
        pytest.param(
            [(f"{TORCH}/optim/optimizer.py", "load_state_dict"), MAIN], NOT_BEGUN, "setup", id="resume"
        ),
        pytest.param(
            [("/own/lion.py", "step"), NO_GRAD, MAIN], BEGUN, "optimizer", id="optimizer-of-ones-own"
        ),
        pytest.param([("/own/optimizer.py", "step"), MAIN], BEGUN, "optimizer", id="file-named-optimizer"),
        pytest.param([("/own/ema.py", "update"), NO_GRAD, MAIN], BEGUN, "forward", id="averaged-weights"),
        pytest.param([("train.py", "step"), MAIN], BEGUN, "forward", id="a-step-of-the-loop"),
        pytest.param(
            [FORWARD, *MODULE_CALL, ("x.py", "score"), NO_GRAD, MAIN], BEGUN, "evaluation", id="no-grad"
        ),
        pytest.param(
            [FORWARD, *MODULE_CALL, ("x.py", "score"), NO_GRAD, MAIN],
            FrameState(training_begun=True, grad_enabled=True),
            "forward",
            id="decorated-with-enable-grad",
        ),
        pytest.param(
            [("rope.py", "forward"), NO_GRAD, *MODULE_CALL, *MODULE_CALL, MAIN],
            BEGUN,
            "forward",
            id="decorated-part-of-a-model",
        ),
        pytest.param([("model.py", "init_weights"), NO_GRAD, MAIN], NOT_BEGUN, "setup", id="initialisation"),
        pytest.param([("train.py", "evaluate"), MAIN], BEGUN, "evaluation", id="evaluate"),
        pytest.param(
            [FORWARD, *MODULE_CALL, ("t.py", "prediction_step"), ("t.py", "_maybe_log_save_evaluate")],
            BEGUN,
            "evaluation",
            id="trainer",
        ),
        pytest.param([FORWARD, *MODULE_CALL, ("t.py", "test")], NOT_BEGUN, "evaluation", id="test"),
        pytest.param([FORWARD, *MODULE_CALL, ("t.py", "Model.generate")], BEGUN, "evaluation", id="generate"),
        pytest.param(
            [FORWARD, *MODULE_CALL, ("t.py", "validation_step"), ("t.py", "train_one_epoch"), MAIN],
            BEGUN,
            "evaluation",
            id="validation-inside-training",
        ),
        pytest.param(
            [FORWARD, *MODULE_CALL, ("t.py", "training_step"), ("t.py", "evaluate"), MAIN],
            BEGUN,
            "forward",
            id="training-inside-an-evaluation",
        ),
        pytest.param([FORWARD, *MODULE_CALL, ("t.py", "train_and_evaluate")], BEGUN, "forward", id="both"),
        pytest.param(
            [("t.py", "predict_noise"), *MODULE_CALL, MAIN], BEGUN, "forward", id="part-of-the-model"
        ),
        pytest.param([("t.py", "_validate_args"), MAIN], BEGUN, "forward", id="checks-arguments"),
        pytest.param(
            [(f"{TORCH}/_inductor/codegen/wrapper.py", "generate"), MAIN], BEGUN, "forward", id="code"
        ),
        pytest.param(
            [FORWARD, *MODULE_CALL, MAIN],
            FrameState(training_begun=True, grad_enabled=False),
            "evaluation",
            id="no-grad-block",
        ),
        pytest.param(
            [FORWARD, *MODULE_CALL, (f"{TORCH}/utils/checkpoint.py", "forward"), *MODULE_CALL, MAIN],
            FrameState(training_begun=True, grad_enabled=False),
            "forward",
            id="reentrant-checkpoint",
        ),
        pytest.param(
            [FORWARD, *MODULE_CALL, MAIN],
            FrameState(training_begun=True, eval_mode=True),
            "evaluation",
            id="eval-mode",
        ),
        pytest.param([], NOT_BEGUN, "setup", id="no-frames"),
        pytest.param(
            [(r"C:\venv\Lib\site-packages\torch\optim\adam.py", "step"), MAIN],
            BEGUN,
            "optimizer",
            id="windows",
        ),
    ],
)
def test_the_phase_by_the_frames(frames: list[tuple[str, str]], state: FrameState, phase: Phase) -> None:
    assert moment_from_frames([(file, name, 1) for file, name in frames], state) == phase


def frames_of(fail: Callable[[], Any]) -> list[tuple[str, str, int]]:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as caught:
        fail()
    trace = traceback.extract_tb(caught.value.__traceback__)
    return [(frame.filename, frame.name, frame.lineno or 0) for frame in reversed(trace)]


def test_the_phase_by_frames_of_the_installed_torch() -> None:
    torch = pytest.importorskip("torch")
    huge = 1 << 50

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return torch.empty(huge)

    class Greedy(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.empty(huge)

    class Optimizer(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            torch.empty(huge)

    weight = torch.ones(2, requires_grad=True)
    model = Greedy()
    scored = torch.no_grad()(lambda: model(weight))

    assert moment_from_frames(frames_of(lambda: Fails.apply(weight).sum().backward()), BEGUN) == "backward"
    assert moment_from_frames(frames_of(lambda: model(weight)), NOT_BEGUN) == "forward"
    assert moment_from_frames(frames_of(Optimizer([weight], {}).step), BEGUN) == "optimizer"
    assert moment_from_frames(frames_of(scored), BEGUN) == "evaluation"
    assert moment_from_frames(frames_of(lambda: torch.empty(huge)), NOT_BEGUN) == "setup"


# Why then

LATE = Moment(phase="forward", step=40, microbatch=0, backwards=40, device="cuda:0")
MOMENTS = [
    pytest.param(Moment("setup", 0, device="cuda:0"), "setup", "M4", id="setup"),
    pytest.param(Moment("setup", 0, device="cpu"), "setup on the host", "M3", id="setup-cpu"),
    pytest.param(Moment("forward", 0, device="cuda:0"), "first forward", "M4", id="first-forward"),
    pytest.param(Moment("forward", 0, device="cpu"), "first forward", "M4", id="first-forward-cpu"),
    pytest.param(Moment("backward", 0, device="cuda:0"), "first backward", "M14", id="first-backward"),
    pytest.param(Moment("forward", 0, 1, 1, device="cuda:0"), "second micro-batch", "M14", id="accumulation"),
    pytest.param(
        Moment("optimizer", 0, 1, 1, device="cuda:0"), "first optimizer step", "M17", id="first-step"
    ),
    pytest.param(
        Moment("optimizer", 0, 4, 4, device="cpu"), "first optimizer step", "M17", id="first-step-cpu"
    ),
    pytest.param(
        Moment("forward", 1, 0, 1, device="cuda:0"), "after the first step", "M17", id="second-forward"
    ),
    pytest.param(
        Moment("backward", 1, 0, 1, device="cuda:0"), "after the first step", "M17", id="second-backward"
    ),
    pytest.param(
        Moment("forward", 1, 0, 1, 900, 300, device="cuda:0"),
        "after the first step",
        "M17",
        id="second-and-longer",
    ),
    pytest.param(Moment("evaluation", 7, 0, 7, device="cuda:0"), "evaluation", "M15", id="evaluation"),
    pytest.param(
        Moment("evaluation", 7, 0, 7, grad_enabled=True, device="cuda:0"),
        "evaluation with gradients",
        "M15",
        id="evaluation-records",
    ),
    pytest.param(
        Moment("evaluation", 0, grad_enabled=False, device="cpu"),
        "evaluation without gradients",
        "M15",
        id="evaluation-before-training",
    ),
    pytest.param(
        replace(LATE, input_elements=9, largest_input_before=8), "longest batch", "M16", id="longest"
    ),
    pytest.param(replace(LATE, input_elements=8, largest_input_before=8), "growth", "M20", id="not-longer"),
    pytest.param(LATE, "unmeasured", "M19", id="sizes-unknown"),
    pytest.param(replace(LATE, phase="optimizer"), "later optimizer step", "M20", id="later-step"),
    pytest.param(
        Moment("backward", 0, 900, 900, 64, 64, device="cuda:0"),
        "growth",
        "M20",
        id="micro-batches-without-steps",
    ),
    pytest.param(Moment("forward", 5, 0, 5, device="host"), "host", "M3", id="host"),
]


@pytest.mark.parametrize(("moment", "cause", "entry"), MOMENTS)
def test_the_moment_decides(moment: Moment, cause: Cause, entry: str) -> None:
    assert cause_of("", moment, moment.device) == cause
    found = describe("", moment, OomFields(), [], None)
    assert found.playbook == entry
    assert (found.kind, found.device, found.phase) == ("out_of_memory", moment.device, moment.phase)
    assert found.step == moment.step
    assert found.bytes is None


def test_without_optimizer_state_alive_the_second_step_is_like_any_other() -> None:
    moment = Moment("forward", 1, 0, 1, 64, 64, device="cuda:0")
    assert (
        cause_of("", moment, "cuda:0", [("parameter", GIB), ("optimizer state", 2 * GIB)])
        == "after the first step"
    )
    assert cause_of("", moment, "cuda:0", [("parameter", GIB), ("variable", 70 * GIB)]) == "growth"


def test_every_cause_is_reached_and_names_an_entry() -> None:
    reached = {cause_of("", moment, moment.device) for moment, *_ in (case.values for case in MOMENTS)}
    reached |= {cause_of(text, LATE, "host") for text in (SHM, WORKER)}
    assert reached == set(ADVICE) == set(get_args(Cause))
    for advice in ADVICE.values():
        assert set(re.findall(r"\bM\d+\b", advice.fix)) | {advice.entry} <= PLAYBOOK.keys()


SHRINKS_FIRST = re.compile(r"^[^.;]*(smaller|reduce|lower)[^.;]*batch", re.IGNORECASE)


@pytest.mark.parametrize("cause", get_args(Cause))
def test_a_smaller_batch_comes_first_only_where_it_does_not_fit(cause: Cause) -> None:
    advice = ADVICE[cause]
    for fix in (advice.fix, advice.fix_on_cpu or ""):
        assert (SHRINKS_FIRST.match(fix) is not None) == (cause == "first forward" and fix != "")


@pytest.mark.parametrize("cause", get_args(Cause))
def test_advice_for_the_cpu_names_no_settings_of_the_gpu(cause: Cause) -> None:
    if cause in ("setup", "host", "worker", "shared memory"):
        return
    fix = ADVICE[cause].fix_on_cpu or ADVICE[cause].fix
    assert not re.search(r"expandable|foreach|CUDA|nvidia|8-bit|\.cpu\(\)", fix)


# The finding


def found_for(text: str, moment: Moment = LATE, **more: Any) -> Finding:
    return describe(
        text, moment, read_message(text), more.pop("holders", []), more.pop("limit", None), **more
    )


def test_the_finding_of_a_full_card_in_the_first_backward() -> None:
    holders = [("saved for backward", 60 * GIB), ("parameter", 10 * GIB), ("buffer", GIB), ("variable", MIB)]
    moment = Moment("backward", 0, device="cuda:1")
    found = found_for(FULL, moment, holders=holders, factored="1.96 GiB = 8 x 9 x 4 bytes (a x b)")
    assert found.device == "cuda:0", "what the message says goes before what was guessed"
    assert found.bytes == 2104533975
    assert found.playbook == "M14"
    assert found.mechanism == (
        "The first backward asked for 2.0 GiB: gradients come on top of every activation that the forward "
        "saved; most of what was alive: saved for backward 60.0 GiB, parameter 10.0 GiB, buffer 1.0 GiB."
    )
    assert found.fix is not None and found.fix.startswith("Checkpoint")
    assert found.evidence == [
        "died in the backward, after 0 optimizer steps and 0 backwards",
        "an allocation on cuda:0 failed, not one of the host",
        "asked 2.0 GiB, free on cuda:0 1.1 GiB: 901.1 MiB short",
        "75.3 GiB allocated + 1.8 GiB reserved but unallocated + 1.1 GiB free + 983.0 MiB outside this "
        "process's allocator = 79.2 GiB",
        "alive at that instant: saved for backward 60.0 GiB, parameter 10.0 GiB, buffer 1.0 GiB, "
        "variable 1.0 MiB",
        "the request may be 1.96 GiB = 8 x 9 x 4 bytes (a x b)",
    ]


def test_the_finding_of_a_cpu_tensor() -> None:
    found = found_for(CPU, Moment("forward", 0, device="host"), limit="cgroup memory.max, 8.0 GiB")
    assert (found.device, found.bytes, found.playbook) == ("cpu", 116813856768, "M4")
    assert found.evidence[1:] == [
        "a host allocation failed (a CPU tensor): GPU advice does not help",
        "asked 108.8 GiB",
        "the limit: cgroup memory.max, 8.0 GiB",
    ]


@pytest.mark.parametrize(
    ("text", "entry", "first"),
    [
        (SHM, "M3", "Give /dev/shm more room"),
        (WORKER, "M3", "Use fewer DataLoader workers"),
        ("MemoryError", "M3", "Hold less in host memory"),
        (NUMPY, "M3", "Find the length or the index"),
    ],
)
def test_failures_of_the_host_get_advice_for_the_host(text: str, entry: str, first: str) -> None:
    found = found_for(text, replace(LATE, phase="backward"))
    assert (found.device, found.playbook) == ("host", entry)
    assert found.fix is not None and found.fix.startswith(first)
    assert "a host allocation failed: GPU advice does not help" in found.evidence


@pytest.mark.parametrize(
    ("text", "first", "fact"),
    [
        pytest.param(HOLES, "Turn on expandable segments first", "2.3 GiB are reserved but free", id="holes"),
        pytest.param(
            OTHERS, "Free the device first", "13.2 GiB of 16.0 GiB are other processes'", id="others"
        ),
        pytest.param(CAPPED, "Raise or remove the cap", "exceed the cap of 1.2 GiB", id="cap"),
        pytest.param(
            REFUSED, "Look for what makes the driver refuse", "although enough was free", id="refused"
        ),
        pytest.param(SPILLED, "Compare", "allocated exceeds the device by 5.7 GiB", id="spilled"),
        pytest.param(
            "CUDA out of memory. Tried to allocate more than 1EB memory.",
            "Find the length or the index",
            "no machine has that much",
            id="1EB",
        ),
        pytest.param(FULL, "Compare", "901.1 MiB short", id="plainly-full"),
    ],
)
def test_what_the_figures_prove_comes_first(text: str, first: str, fact: str) -> None:
    found = found_for(text)
    assert found.fix is not None and found.fix.startswith(first)
    assert any(fact in line for line in found.evidence)


def test_a_request_larger_than_the_device_is_said_so() -> None:
    text = FULL.replace("Tried to allocate 1.96 GiB", "Tried to allocate 90.00 GiB")
    assert "the request alone exceeds the device's 79.2 GiB" in found_for(text).evidence


def test_messages_without_sizes_say_who_may_have_asked() -> None:
    assert any("pinned host memory" in line for line in found_for(BARE).evidence)
    assert any("by a library failed on cuda:0" in line for line in found_for(CUBLAS).evidence)


def test_the_longest_batch_is_shown_with_both_sizes() -> None:
    found = found_for(FULL, replace(LATE, input_elements=65536, largest_input_before=8192))
    assert found.playbook == "M16"
    assert "the batch in work has 65,536 elements, the largest before it 8,192 (8.00 times)" in found.evidence


@pytest.mark.parametrize(("enabled", "word"), [(True, "enabled"), (False, "disabled")])
def test_evaluation_says_whether_gradients_were_on(enabled: bool, word: str) -> None:
    found = found_for(FULL, Moment("evaluation", 3, 0, 3, grad_enabled=enabled, device="cuda:0"))
    assert f"gradients were {word}" in found.evidence
    assert found.fix is not None
    assert ("no_grad" in found.fix) == enabled


@given(
    st.builds(
        Moment,
        phase=st.sampled_from(get_args(Phase)),
        step=st.integers(0, 3),
        microbatch=st.integers(0, 3),
        backwards=st.integers(0, 3),
        input_elements=st.none() | st.integers(0, 100),
        largest_input_before=st.none() | st.integers(0, 100),
        grad_enabled=st.none() | st.booleans(),
        device=st.sampled_from(["cpu", "host", "cuda:3"]),
    ),
    st.sampled_from([FULL, CPU, NUMPY, SHM, BARE, CUBLAS, ASYNC, ""]),
)
def test_every_moment_gets_a_whole_finding(moment: Moment, text: str) -> None:
    found = found_for(text, moment)
    assert found.playbook in PLAYBOOK
    assert found.mechanism is not None and found.mechanism.endswith(".") and "{" not in found.mechanism
    assert found.fix is not None and found.fix.endswith(".")
    assert all(found.evidence)
