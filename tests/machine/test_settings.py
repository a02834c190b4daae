import gc

import pytest

from memtriage.machine import settings as settings_module


def settings(torch=(2, 13), **env):
    return {fact.name: fact for fact in settings_module.settings(env, torch)}


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_AVOID_RECORD_STREAMS"])
def test_settings_worth_a_word(name):
    assert settings()[name].status == "ok"
    assert settings(**{name: "1"})[name].status == "note"


def test_allocator_settings_that_contradict_each_other():
    both = settings(PYTORCH_CUDA_ALLOC_CONF="a:1", PYTORCH_ALLOC_CONF="a:2")
    assert both["PYTORCH_CUDA_ALLOC_CONF"].value == "a:1"
    assert both["PYTORCH_ALLOC_CONF"].value == "a:2"
    assert {both[name].status for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")} == {"bad"}
    same = settings(PYTORCH_CUDA_ALLOC_CONF="a:1", PYTORCH_ALLOC_CONF="a:1")
    assert {same[name].status for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")} == {"ok"}


def test_new_settings_name_under_an_old_torch():
    assert settings(torch=(2, 9), PYTORCH_ALLOC_CONF="a:1")["PYTORCH_ALLOC_CONF"].status == "note"
    assert settings(torch=(2, 10), PYTORCH_ALLOC_CONF="a:1")["PYTORCH_ALLOC_CONF"].status == "ok"


def test_caching_is_off_whatever_the_value():
    name = "PYTORCH_NO_CUDA_MEMORY_CACHING"
    assert settings()[name].status == "ok"
    assert settings(**{name: "0"})[name].status == "bad"


def test_another_malloc():
    fact = settings(LD_PRELOAD="/usr/lib/libjemalloc.so.2")["LD_PRELOAD"]
    assert fact.status == "note"
    assert "jemalloc" in fact.advice
    assert settings(LD_PRELOAD="/usr/lib/libother.so")["LD_PRELOAD"].status == "ok"


@pytest.mark.parametrize(
    ("text", "value", "status"),
    [
        ("always [madvise] never\n", "madvise", "ok"),
        ("[always] madvise never\n", "always", "note"),
        ("what", "n/a", "ok"),
        (None, "n/a", "ok"),
    ],
)
def test_huge_pages(text, value, status):
    fact = settings_module.huge_pages(text)
    assert (fact.value, fact.status) == (value, status)


def test_collector_that_is_off():
    assert settings()["gc"].status == "ok"
    gc.disable()
    try:
        assert settings()["gc"].status == "note"
    finally:
        gc.enable()


def test_nothing_set_needs_no_advice():
    facts = settings()
    assert {fact.advice for fact in facts.values()} == {None}
    assert {fact.status for fact in facts.values()} == {"ok"}
    assert facts["CUDA_VISIBLE_DEVICES"].value == "not set"


@pytest.mark.parametrize(
    ("variables", "name", "advice"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING", "unset it to train"),
        ({"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}, "TORCH_NCCL_AVOID_RECORD_STREAMS", "It can go"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}, "PYTORCH_NO_CUDA_MEMORY_CACHING", "Unset it"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:1"},
            "PYTORCH_CUDA_ALLOC_CONF",
            "set one",
        ),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:1"},
            "PYTORCH_ALLOC_CONF",
            "See PYTORCH",
        ),
        ({"PYTORCH_ALLOC_CONF": "a:1"}, "PYTORCH_ALLOC_CONF", "torch before 2.10"),
    ],
)
def test_advice(variables, name, advice):
    fact = settings(torch=(2, 9), **variables)[name]
    assert advice in fact.advice and fact.value == variables[name]


@pytest.mark.parametrize("value", ["", "0"])
def test_a_flag_that_is_off(value):
    assert settings(CUDA_LAUNCH_BLOCKING=value)["CUDA_LAUNCH_BLOCKING"].status == "ok"


def test_without_torch_no_name_is_too_new():
    assert settings(torch=None, PYTORCH_ALLOC_CONF="a:1")["PYTORCH_ALLOC_CONF"].status == "ok"
