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


def test_releases_from_which_on_torch_can_show_more():
    bare = SimpleNamespace(_C=SimpleNamespace())
    since = {name: fact.advice for name, fact in by_name(bare).items()}
    assert {name: advice.split()[1] for name, advice in since.items() if "newer" in advice} == {
        "tensors saved for backward": "2.10",
        "allocation history": "2.8",
        "history without some actions": "2.11",
        "history of pinned memory": "2.14",
        "segments without traces": "2.11",
        "stack of a live block": "2.12",
        "labels on traces": "2.10",
        "labels on tensors": "2.14",
        "pinned-memory statistics": "2.8",
        "release of pinned memory": "2.12",
        "hook on new graph nodes": "2.14",
        "pools that never split": "2.10",
    }
    assert since["view into an out-of-memory"] == "CUDA builds of torch only."


def test_what_is_there_needs_no_advice():
    fact = by_name(torch_with(lambda enabled: None))["allocation history"]
    assert (fact.value, fact.status, fact.advice) == ("yes", "ok", None)
    torch = torch_with(lambda enabled: None)
    torch._C._cuda_attach_out_of_memory_observer = print
    fact = by_name(torch)["view into an out-of-memory"]
    assert (fact.value, fact.status, fact.advice) == ("yes", "ok", None)


def test_a_builtin_without_a_signature_does_not_show_its_parameters():
    assert by_name(torch_with(dict.fromkeys))["allocation history"].value == "yes"
    assert by_name(torch_with(type))["history without some actions"].value == "no"
