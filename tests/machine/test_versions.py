from types import SimpleNamespace

from memtriage.machine.versions import other_accelerators, versions


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
