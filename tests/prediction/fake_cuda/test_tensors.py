"""Tensors without data say that they are on the GPU, and go where a program sends them."""

import threading

import pytest
import torch

from memtriage.prediction.fake_cuda import tensors
from memtriage.prediction.fake_cuda.tensors import CPU, CUDA, META
from support.traced import traced

LARGE = 3 << 20
"""Numbers of a tensor of the host that has no data in a trace."""


def said(tensor):
    """What a tensor says of its place."""
    return (
        str(tensor.device), tensor.is_cuda, tensor.is_cpu, tensor.is_meta, tensor.get_device(),
        tensor.is_pinned(), tensor.pin_memory() is tensor,
    )  # fmt: skip


def known_as(tensor):
    return (
        str(tensors.true_device(tensor)), tensors.is_gpu(tensor), tensors.is_host_fake(tensor),
        str(tensors.fake_device(tensor)),
    )  # fmt: skip


ON_GPU = ("cuda:2", True, False, False, 2, False, True)
ON_HOST = ("cpu", False, True, False, -1, False, True)


def test_a_tensor_says_where_it_plays_to_be():
    def run(device):
        made = {
            "gpu": torch.empty(3, device=device),
            "host": torch.ones(3),
            "large": torch.empty(LARGE),
            "meta": torch.empty(3, device="meta"),
        }
        played = {name: (said(each), known_as(each)) for name, each in made.items()}
        with tensors.devices_true():
            inside = [str(each.device) for each in made.values()]
            assert tensors.in_kernel()
        assert not tensors.in_kernel() and tensors.gpu() == device
        return played, inside

    answer = traced(run, world_size=4, rank=2).answer
    assert answer == (
        {
            "gpu": (ON_GPU, ("meta", True, False, "cuda:2")),
            "host": (ON_HOST, ("cpu", False, False, "cpu")),
            "large": (ON_HOST, ("meta", False, True, "cpu")),
            "meta": (
                ("meta", False, False, True, -1, False, True),
                ("meta", False, False, "meta"),
            ),
        },
        ["meta", "cpu", "meta", "meta"],
    )
    assert tensors.gpu() == CUDA
    assert str(torch.empty(3, device="meta").device) == "meta"


def test_a_storage_may_play_either_device():
    made = torch.empty(3, device="meta", requires_grad=True)
    gpu = tensors.as_device(made, CUDA)
    host = tensors.as_device(made, CPU)
    assert tensors.as_device(gpu, CUDA) is gpu and tensors.as_device(host, CPU) is host
    assert gpu.untyped_storage()._cdata == host.untyped_storage()._cdata == made.untyped_storage()._cdata
    assert gpu.requires_grad and (tensors.is_gpu(gpu), tensors.is_gpu(host)) == (True, False)
    assert (tensors.is_host_fake(gpu), tensors.is_host_fake(host)) == (False, True)
    real = torch.ones(2)
    assert tensors.as_device(real, CUDA) is real


GPU, HALF, WIDE = "cuda:2", "float16", "float64"
WAYS = {
    "to(device)": (lambda x, gpu, other: x.to(gpu), (GPU, None, False)),
    "to('cuda')": (lambda x, gpu, other: x.to("cuda"), (GPU, None, False)),
    "to(2)": (lambda x, gpu, other: x.to(2), (GPU, None, False)),
    "to('cpu')": (lambda x, gpu, other: x.to("cpu"), ("cpu", None, False)),
    "to(device, dtype)": (lambda x, gpu, other: x.to(gpu, torch.float16), (GPU, HALF, False)),
    "to(device, None)": (lambda x, gpu, other: x.to(gpu, None), (GPU, None, False)),
    "to(device, same dtype)": (lambda x, gpu, other: x.to(gpu, torch.float32), (GPU, None, False)),
    "to(dtype)": (lambda x, gpu, other: x.to(torch.float16), (None, HALF, False)),
    "to(dtype, non_blocking)": (lambda x, gpu, other: x.to(torch.float16, True), (None, HALF, False)),
    "to(dtype=, device=)": (lambda x, gpu, other: x.to(dtype=torch.float16, device=gpu), (GPU, HALF, False)),
    "to(device, copy=True)": (lambda x, gpu, other: x.to(gpu, copy=True), (GPU, None, True)),
    "to(device, non_blocking=True)": (lambda x, gpu, other: x.to(gpu, non_blocking=True), (GPU, None, False)),
    "to(device, copy=False)": (lambda x, gpu, other: x.to(gpu, copy=False), (GPU, None, False)),
    "all by position": (lambda x, gpu, other: x.to(gpu, torch.float32, False, True), (GPU, None, True)),
    "to(other)": (lambda x, gpu, other: x.to(other), (GPU, WIDE, False)),
    "to(other=)": (lambda x, gpu, other: x.to(other=other), (GPU, WIDE, False)),
    "to(other, True)": (lambda x, gpu, other: x.to(other, True), (GPU, WIDE, False)),
    "to(memory_format=)": (
        lambda x, gpu, other: x.to(memory_format=torch.contiguous_format), (None, None, False),
    ),
    "to('meta')": (lambda x, gpu, other: x.to("meta"), ("meta", None, False)),
    "to('meta', dtype)": (lambda x, gpu, other: x.to("meta", torch.float16), ("meta", HALF, False)),
    "cuda()": (lambda x, gpu, other: x.cuda(), (GPU, None, False)),
    "cuda(2)": (lambda x, gpu, other: x.cuda(2), (GPU, None, False)),
    "cpu()": (lambda x, gpu, other: x.cpu(), ("cpu", None, False)),
    "new_tensor": (lambda x, gpu, other: x.new_tensor([1.0, 2.0]), (None, None, True)),
    "new_tensor on the host": (
        lambda x, gpu, other: x.new_tensor([1], device="cpu", dtype=torch.int32), ("cpu", "int32", True),
    ),
}  # fmt: skip
"""Each way to move a tensor of 32 bits, and what it asks for: place, type, and a copy in any case."""


@pytest.mark.parametrize(
    ("make", "own"),
    [
        (lambda device: torch.empty(3, device=device), GPU),
        (lambda device: torch.ones(3), "cpu"),
        (lambda device: torch.empty(LARGE), "cpu"),
        (lambda device: torch.empty(3, device="meta"), "meta"),
    ],
    ids=["gpu", "host", "large", "meta"],
)
def test_tensors_are_moved_and_cast_only_where_they_differ(make, own):
    def run(device):
        tensor, other = make(device), torch.empty(1, device=device, dtype=torch.float64)
        with pytest.raises(TypeError):
            tensor.to(torch.float16, device=device)
        for name, (move, (place, kind, copied)) in WAYS.items():
            if own == "meta" and place == "cpu" and not name.startswith("new_tensor"):
                with pytest.raises(NotImplementedError):
                    move(tensor, device, other)
                continue
            moved = move(tensor, device, other)
            wanted = place or own, kind or "float32"
            assert (str(moved.device), str(moved.dtype)) == (wanted[0], f"torch.{wanted[1]}"), name
            assert (moved is tensor) == (wanted == (own, "float32") and not copied), name
        return True

    assert traced(run, world_size=4, rank=2).answer


def test_what_a_copy_takes():
    def run(device):
        made = torch.empty(64, device=device)
        made.to(device).cuda().to(torch.float32).to(device, torch.float16).to("meta")
        made.to(device, copy=True)
        torch.ones(64).to(device)
        torch.ones(64).to("meta")

    assert traced(run).made == "empty 256, _to_copy 128, _to_copy 256, _to_copy 256"


def test_values_and_texts_of_tensors():
    def run(device):
        there = torch.tensor([1, 2], device=device)
        with tensors.devices_true():
            inside = repr(there), repr(torch.ones(2)), repr(there.untyped_storage().nbytes())
        return there.tolist(), repr(there), torch.ones(2).tolist(), repr(torch.ones(2)), inside

    assert traced(run).answer == (
        [1, 2],
        "tensor(..., device='cuda:0', size=(2,), dtype=torch.int64)",
        [1.0, 1.0],
        "tensor([1., 1.])",
        (
            "tensor(..., device='meta', size=(2,), dtype=torch.int64)",
            "tensor(..., device='cpu', size=(2,), dtype=torch.float32)",
            "16",
        ),
    )


def test_addresses_are_refused_to_native_code_alone():
    def run(device):
        there, real = torch.empty(3, device=device), torch.ones(3)
        with tensors.addresses_refused():
            with tensors.addresses_refused():
                pass
            with pytest.raises(tensors.AddressRefusedError, match=r"^a tensor without data has no address$"):
                there.data_ptr()
            inside = real.data_ptr()
        return inside == real.data_ptr() != 0, isinstance(there.data_ptr(), int)

    assert traced(run).answer == (True, True)


def test_a_parameter_that_is_not_initialized_may_be_moved():
    def run(device):
        layer = torch.nn.LazyLinear(4).to(device)
        before = str(layer.weight.device)
        layer(torch.empty(2, 3, device=device))
        return before, str(layer.weight.device), tuple(layer.weight.shape)

    assert traced(run).answer == ("cuda:0", "cuda:0", (4, 3))


def test_inner_tensors_of_wrappers_are_found():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, first, second):
            made = torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device="meta")
            made.first, made.second, made.note = first, second, "no tensor"
            return made

        def __tensor_flatten__(self):
            return ["first", "note", "second"], None

        __torch_dispatch__ = classmethod(lambda cls, func, types, args, kwargs=None: NotImplemented)

    plain, gpu = torch.ones(2), tensors.as_device(torch.empty(2, device="meta"), CUDA)
    inner = Wrapper(gpu, plain)
    outer = Wrapper(inner, plain)
    assert tensors.parts(plain) == [plain]
    assert [id(part) for part in tensors.parts(outer)] == [id(gpu), id(plain), id(plain)]
    assert tensors.fake_device(outer) == CUDA
    assert tensors.fake_device(Wrapper(plain, gpu)) == CPU


def test_meta_is_meant_where_the_program_says_so():
    def meant(*args, **kwargs):
        return tensors.meta_is_meant()

    asks = tensors.meaning_meta(meant, lambda *args, **kwargs: kwargs.get("device") == META)
    through = tensors.meaning_meta(lambda: (asks(), tensors.meta_is_meant()), lambda: True)
    assert (asks(device=META), asks(device=CPU), asks(), tensors.meta_is_meant()) == (
        True,
        False,
        False,
        False,
    )
    assert through() == (True, True)
    failing = tensors.meaning_meta(lambda: 1 / 0, lambda: True)
    with pytest.raises(ZeroDivisionError):
        failing()
    assert not tensors.meta_is_meant() and meant.__name__ == asks.__name__


def test_kernels_see_the_meta_device():
    made = tensors.as_device(torch.empty(2, 3, device="meta"), CUDA)
    with tensors.kernel():
        assert tensors.in_kernel()
        with tensors.kernel():
            pass
        assert tensors.in_kernel()
        result = made + 1
    assert not tensors.in_kernel() and tensors.true_device(result).type == "meta"


def test_what_a_thread_does_is_not_taken_for_what_another_means():
    """As a DataLoader's thread that pins memory makes tensors between any two lines of the program."""
    inside, left = threading.Event(), threading.Event()

    def asks_for_meta():
        inside.set()
        assert left.wait(60)

    asking = tensors.meaning_meta(asks_for_meta, lambda: True)
    other = threading.Thread(target=asking)
    other.start()

    def makes():
        left.set()
        other.join(60)

    assert inside.wait(60)
    tensors.meaning_meta(makes, lambda: False)()
    assert not tensors.meta_is_meant()


class Asking(torch.nn.Parameter):
    """Takes part in what is called with it, as 4-bit parameters do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_parameter_with_functions_of_its_own_is_known_for_one():
    def run(device):
        made = Asking(torch.empty(3, device=device))
        return known_as(made)

    assert traced(run).answer == (str(META), True, False, str(CUDA))
