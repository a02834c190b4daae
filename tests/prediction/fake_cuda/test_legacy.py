"""Legacy tensor types of CUDA, and a default type of the device."""

import pytest
import torch

from support.traced import traced


@pytest.mark.parametrize(
    "name",
    ["Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool"],
)
def test_each_type_is_of_the_device_with_the_numbers_of_its_like_on_the_host(name):
    of_gpu, of_host = f"torch.cuda.{name}Tensor", f"torch.{name}Tensor"

    def run(device):
        kind, host = getattr(torch.cuda, f"{name}Tensor"), getattr(torch, f"{name}Tensor")
        made = kind([1, 0, 1])
        source = made.clone()
        return {
            "name": (
                made.type(),
                made.cpu().type(),
                made.type(host).type(),
                torch.ones(1).type(of_gpu).type(),
            ),
            "kind": (kind.dtype is host.dtype, kind.is_cuda, isinstance(made, kind), isinstance(made, host)),
            "values": made.tolist() == host([1, 0, 1]).tolist(),
            "sizes": [tuple(each.shape) for each in (kind(), kind(2), kind(2, 3), kind(torch.Size([4])))],
            "of a tensor": (kind(source).data_ptr() == source.data_ptr(), kind(source).requires_grad),
            "new": [tuple(each.shape) for each in (made.new(), made.new(2, 3), made.new(torch.Size([2])))],
            "device": kind(3, device="cuda").device == device,
            "same": made.type(kind) is made and made.type(of_gpu) is made and made.type_as(source) is made,
            "host": made.cpu().new(2).type() == of_host,
        }

    assert traced(run).answer == {
        "name": (of_gpu, of_host, of_host, of_gpu),
        "kind": (True, True, True, False),
        "values": True,
        "sizes": [(0,), (2,), (2, 3), (4,)],
        "of a tensor": (True, False),
        "new": [(0,), (2, 3), (2,)],
        "device": True,
        "same": True,
        "host": True,
    }


def test_other_types_are_torchs_own():
    def run(device):
        with pytest.raises(ValueError, match="invalid type"):
            torch.ones(2).type("torch.NoTensor")
        return (
            torch.ones(2).cfloat().type(),
            torch.empty(2, dtype=torch.complex64, device=device).type(torch.float16).dtype,
            torch.ones(2).type(torch.half).type(),
            torch.ones(2).type("torch.DoubleTensor").type(),
        )

    assert traced(run).answer == (
        *("torch.ComplexFloatTensor", torch.float16, "torch.HalfTensor", "torch.DoubleTensor"),
    )


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_a_default_type_is_a_default_device_and_dtype():
    def run(device):
        found = []
        for kind in (
            "torch.cuda.HalfTensor",
            torch.cuda.DoubleTensor,
            "torch.DoubleTensor",
            torch.FloatTensor,
        ):
            torch.set_default_tensor_type(kind)
            made = torch.ones(2)
            found.append((made.device.type, made.dtype))
        return found

    assert traced(run).answer == [
        ("cuda", torch.float16), ("cuda", torch.float64), ("cpu", torch.float64), ("cpu", torch.float32),
    ]  # fmt: skip
