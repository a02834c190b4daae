import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest

from memtriage.machine.versions import devices, other_accelerators, versions


def by_name(facts):
    return {fact.name: fact for fact in facts}


def test_versions_of_a_torch_that_is_too_old():
    torch = SimpleNamespace(__version__="2.7.1+cu126", version=SimpleNamespace(cuda="12.6", hip=None))
    facts = by_name(versions(torch))
    assert facts["torch"].status == "bad"
    assert facts["CUDA of torch"].value == "12.6"


def test_the_oldest_release_that_is_tested_is_good():
    torch = SimpleNamespace(__version__="2.8.0", version=SimpleNamespace(cuda=None, hip=None))
    assert by_name(versions(torch))["torch"].status == "ok"


def test_without_torch_the_reason_is_given():
    facts = by_name(versions(None, "libcudart.so.13: cannot open shared object file"))
    assert facts["torch"].status == "bad"
    assert "libcudart.so.13" in facts["torch"].value


def test_accelerators_that_are_not_counted():
    there, absent = SimpleNamespace(is_available=lambda: True), SimpleNamespace(is_available=lambda: False)
    torch = SimpleNamespace(
        version=SimpleNamespace(hip="6.2"), xpu=there, backends=SimpleNamespace(mps=absent)
    )
    assert by_name(other_accelerators(torch)).keys() == {"ROCm", "XPU"}
    torch = SimpleNamespace(version=SimpleNamespace(hip=None), backends=SimpleNamespace(mps=there))
    assert by_name(other_accelerators(torch)).keys() == {"MPS"}


def test_what_torch_was_built_for():
    def built_for(**of):
        torch = SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(**of))
        return by_name(versions(torch))["CUDA of torch"].value

    assert built_for(cuda="13.0", hip=None) == "13.0"
    assert built_for(cuda=None, hip="6.2") == "ROCm 6.2"
    assert built_for(cuda=None, hip=None).startswith("none: a CPU build")


class Nvml(ModuleType):
    """As nvidia-ml-py, on a machine with a driver."""

    NVMLError = type("NVMLError", (Exception,), {})
    closed = 0

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        self.closed += 1

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 12080

    def nvmlSystemGetDriverVersion(self):
        return b"570.86"


def test_the_driver_and_the_cuda_that_it_supports(monkeypatch):
    nvml = Nvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    facts = by_name(versions(None))
    assert (facts["NVIDIA driver"].value, facts["CUDA of driver"].value) == ("570.86", "12.8")
    assert nvml.closed == 1


def gpu_torch(available, cuda="13.0", said=None):
    def is_available():
        if said:
            warnings.warn(said, stacklevel=1)
        return available

    properties = SimpleNamespace(name="NVIDIA H100", total_memory=80 << 30, major=9, minor=0)
    cuda_module = SimpleNamespace(
        is_available=is_available, device_count=lambda: 2, get_device_properties=lambda index: properties
    )
    return SimpleNamespace(
        cuda=cuda_module, version=SimpleNamespace(cuda=cuda, hip=None), backends=SimpleNamespace(mps=None)
    )


def test_devices_that_torch_can_use():
    facts = by_name(devices(gpu_torch(True)))
    assert {name: fact.value for name, fact in facts.items()} == {
        f"cuda:{index}": "NVIDIA H100, 80.0 GiB, compute capability 9.0" for index in (0, 1)
    }
    assert list(devices(None)) == []


@pytest.mark.parametrize(
    ("cuda", "said", "status", "advice"),
    [
        ("13.0", "the driver is too old", "bad", "Check the driver"),
        ("13.0", None, "note", "Check the driver"),
        (None, None, "note", "built for CPU only"),
    ],
)
def test_why_there_is_no_gpu(cuda, said, status, advice):
    (fact,) = devices(gpu_torch(False, cuda, said))
    assert fact.status == status and advice in fact.advice
    assert fact.value == "none that torch can use" + (f": {said}" if said else "")
