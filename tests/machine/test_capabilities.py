from types import SimpleNamespace

from memtriage.machine.capabilities import capabilities


def torch_with(record_memory_history):
    memory = SimpleNamespace(_record_memory_history=record_memory_history)
    return SimpleNamespace(cuda=SimpleNamespace(memory=memory), _C=SimpleNamespace())


def by_name(torch):
    return {fact.name: fact for fact in capabilities(torch)}


def test_function_without_the_parameter_of_a_newer_release():
    facts = by_name(torch_with(lambda enabled: None))
    assert facts["allocation history"].value == "yes"
    assert facts["history without some actions"].value == "no"
    assert "2.11" in facts["history without some actions"].advice
    newer = by_name(torch_with(lambda enabled, skip_actions: None))
    assert newer["history without some actions"].value == "yes"


def test_function_that_is_absent():
    facts = by_name(torch_with(lambda enabled: None))
    assert (facts["stack of a live block"].value, facts["stack of a live block"].status) == ("no", "note")


def test_out_of_memory_observer_of_either_name():
    torch = torch_with(lambda enabled: None)
    assert by_name(torch)["view into an out-of-memory"].value == "no"
    torch._C._cuda_attachOutOfMemoryObserver = print
    assert by_name(torch)["view into an out-of-memory"].value == "yes"
