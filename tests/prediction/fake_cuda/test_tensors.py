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


def moves(device, tensor):
    """What comes of each way to move a tensor: whether it stays the same, else its place and type."""
    other = torch.empty(1, device=device, dtype=torch.float64)
    ways = {
        "to(device)": lambda: tensor.to(device),
        "to('cuda')": lambda: tensor.to("cuda"),
        "to(2)": lambda: tensor.to(2),
        "to('cpu')": lambda: tensor.to("cpu"),
        "to(device, dtype)": lambda: tensor.to(device, torch.float16),
        "to(device, None)": lambda: tensor.to(device, None),
        "to(device, same dtype)": lambda: tensor.to(device, torch.float32),
        "to(dtype)": lambda: tensor.to(torch.float16),
        "to(dtype, non_blocking)": lambda: tensor.to(torch.float16, True),
        "to(dtype=, device=)": lambda: tensor.to(dtype=torch.float16, device=device),
        "to(device, copy=True)": lambda: tensor.to(device, copy=True),
        "to(device, non_blocking=True)": lambda: tensor.to(device, non_blocking=True),
        "to(device, non_blocking=False)": lambda: tensor.to(device, non_blocking=False, copy=False),
        "to(device, dtype, non_blocking, copy)": lambda: tensor.to(device, torch.float32, False, True),
        "to(other)": lambda: tensor.to(other),
        "to(other=)": lambda: tensor.to(other=other),
        "to(other, True)": lambda: tensor.to(other, True),
        "to(memory_format=)": lambda: tensor.to(memory_format=torch.contiguous_format),
        "to('meta')": lambda: tensor.to("meta"),
        "to('meta', dtype)": lambda: tensor.to("meta", torch.float16),
        "to(dtype=, device='meta')": lambda: tensor.to(dtype=torch.float16, device="meta"),
        "to(dtype, device=)": lambda: tensor.to(torch.float16, device=device),
        "cuda()": lambda: tensor.cuda(),
        "cuda(2)": lambda: tensor.cuda(2),
        "cpu()": lambda: tensor.cpu(),
        "new_tensor": lambda: tensor.new_tensor([1.0, 2.0]),
        "new_tensor on the host": lambda: tensor.new_tensor([1], device="cpu", dtype=torch.int32),
    }
    found = {}
    for name, move in ways.items():
        try:
            moved = move()
        except (NotImplementedError, TypeError) as error:
            found[name] = type(error).__name__
            continue
        same = moved is tensor
        found[name] = "same" if same else f"{moved.device} {str(moved.dtype).removeprefix('torch.')}"
    return found


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda device: torch.empty(3, device=device),
            {
                "to(device)": "same",
                "to('cuda')": "same",
                "to(2)": "same",
                "to('cpu')": "cpu float32",
                "to(device, dtype)": "cuda:2 float16",
                "to(device, None)": "same",
                "to(device, same dtype)": "same",
                "to(dtype)": "cuda:2 float16",
                "to(dtype, non_blocking)": "cuda:2 float16",
                "to(dtype=, device=)": "cuda:2 float16",
                "to(device, copy=True)": "cuda:2 float32",
                "to(device, non_blocking=True)": "same",
                "to(device, non_blocking=False)": "same",
                "to(device, dtype, non_blocking, copy)": "cuda:2 float32",
                "to(other)": "cuda:2 float64",
                "to(other=)": "cuda:2 float64",
                "to(other, True)": "cuda:2 float64",
                "to(memory_format=)": "same",
                "to('meta')": "meta float32",
                "to('meta', dtype)": "meta float16",
                "to(dtype=, device='meta')": "meta float16",
                "to(dtype, device=)": "TypeError",
                "cuda()": "same",
                "cuda(2)": "same",
                "cpu()": "cpu float32",
                "new_tensor": "cuda:2 float32",
                "new_tensor on the host": "cpu int32",
            },
        ),
        (
            lambda device: torch.ones(3),
            {
                "to(device)": "cuda:2 float32",
                "to('cuda')": "cuda:2 float32",
                "to(2)": "cuda:2 float32",
                "to('cpu')": "same",
                "to(device, dtype)": "cuda:2 float16",
                "to(device, None)": "cuda:2 float32",
                "to(device, same dtype)": "cuda:2 float32",
                "to(dtype)": "cpu float16",
                "to(dtype, non_blocking)": "cpu float16",
                "to(dtype=, device=)": "cuda:2 float16",
                "to(device, copy=True)": "cuda:2 float32",
                "to(device, non_blocking=True)": "cuda:2 float32",
                "to(device, non_blocking=False)": "cuda:2 float32",
                "to(device, dtype, non_blocking, copy)": "cuda:2 float32",
                "to(other)": "cuda:2 float64",
                "to(other=)": "cuda:2 float64",
                "to(other, True)": "cuda:2 float64",
                "to(memory_format=)": "same",
                "to('meta')": "meta float32",
                "to('meta', dtype)": "meta float16",
                "to(dtype=, device='meta')": "meta float16",
                "to(dtype, device=)": "TypeError",
                "cuda()": "cuda:2 float32",
                "cuda(2)": "cuda:2 float32",
                "cpu()": "same",
                "new_tensor": "cpu float32",
                "new_tensor on the host": "cpu int32",
            },
        ),
        (
            lambda device: torch.empty(LARGE),
            {
                "to(device)": "cuda:2 float32",
                "to('cuda')": "cuda:2 float32",
                "to(2)": "cuda:2 float32",
                "to('cpu')": "same",
                "to(device, dtype)": "cuda:2 float16",
                "to(device, None)": "cuda:2 float32",
                "to(device, same dtype)": "cuda:2 float32",
                "to(dtype)": "cpu float16",
                "to(dtype, non_blocking)": "cpu float16",
                "to(dtype=, device=)": "cuda:2 float16",
                "to(device, copy=True)": "cuda:2 float32",
                "to(device, non_blocking=True)": "cuda:2 float32",
                "to(device, non_blocking=False)": "cuda:2 float32",
                "to(device, dtype, non_blocking, copy)": "cuda:2 float32",
                "to(other)": "cuda:2 float64",
                "to(other=)": "cuda:2 float64",
                "to(other, True)": "cuda:2 float64",
                "to(memory_format=)": "same",
                "to('meta')": "meta float32",
                "to('meta', dtype)": "meta float16",
                "to(dtype=, device='meta')": "meta float16",
                "to(dtype, device=)": "TypeError",
                "cuda()": "cuda:2 float32",
                "cuda(2)": "cuda:2 float32",
                "cpu()": "same",
                "new_tensor": "cpu float32",
                "new_tensor on the host": "cpu int32",
            },
        ),
        (
            lambda device: torch.empty(3, device="meta"),
            {
                "to(device)": "cuda:2 float32",
                "to('cuda')": "cuda:2 float32",
                "to(2)": "cuda:2 float32",
                "to('cpu')": "NotImplementedError",
                "to(device, dtype)": "cuda:2 float16",
                "to(device, None)": "cuda:2 float32",
                "to(device, same dtype)": "cuda:2 float32",
                "to(dtype)": "meta float16",
                "to(dtype, non_blocking)": "meta float16",
                "to(dtype=, device=)": "cuda:2 float16",
                "to(device, copy=True)": "cuda:2 float32",
                "to(device, non_blocking=True)": "cuda:2 float32",
                "to(device, non_blocking=False)": "cuda:2 float32",
                "to(device, dtype, non_blocking, copy)": "cuda:2 float32",
                "to(other)": "cuda:2 float64",
                "to(other=)": "cuda:2 float64",
                "to(other, True)": "cuda:2 float64",
                "to(memory_format=)": "same",
                "to('meta')": "same",
                "to('meta', dtype)": "meta float16",
                "to(dtype=, device='meta')": "meta float16",
                "to(dtype, device=)": "TypeError",
                "cuda()": "cuda:2 float32",
                "cuda(2)": "cuda:2 float32",
                "cpu()": "NotImplementedError",
                "new_tensor": "meta float32",
                "new_tensor on the host": "cpu int32",
            },
        ),
    ],
    ids=["gpu", "host", "large", "meta"],
)
def test_tensors_are_moved_and_cast_only_where_they_differ(make, expected):
    run = traced(lambda device: moves(device, make(device)), world_size=4, rank=2)
    assert run.answer == expected


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
