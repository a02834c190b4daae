"""What can help a case: which actions of the playbook, in which order, and the bytes that they save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from memtriage import explain
from memtriage.messages.case import Case
from memtriage.messages.fixes import fixes
from memtriage.messages.shapes import Product
from memtriage.model.explanation import Fix
from memtriage.playbook.entries import ACTIONS
from support.message_cases import GIB, MIB, device_case, sizes_case, text_case
from support.message_texts import TEXTS

KEYS = {(entry.name, action.action): key for key, (entry, action) in ACTIONS.items()}
TRAINS = {
    "micro-batch",
    "fused-loss",
    "bf16",
    "checkpointing",
    "optimizer-8bit",
    "shard",
    "adapters",
    "watch",
}
FULL = device_case("does_not_fit", free=GIB, allocated=77 * GIB, reserved_unallocated=GIB)
HOLES = device_case("fragmentation", free=GIB, allocated=60 * GIB, reserved_unallocated=18 * GIB)
OUTSIDE = device_case(
    "other_process_or_outside_allocator", free=GIB, allocated=30 * GIB, reserved_unallocated=GIB
)
KILLED = text_case("killed_unproven", "launcher", "killed")
KERNEL = text_case("host_memory_limit", "kernel-oom")


def key(fix: Fix) -> str:
    known = [name for (entry, action), name in KEYS.items() if entry == fix.playbook and action in fix.action]
    return max(known, key=lambda name: len(ACTIONS[name][1].action))


def keys(case: Case) -> list[str]:
    return [key(fix) for fix in fixes(case)]


def saved(case: Case) -> dict[str, int | None]:
    return {key(fix): fix.saves_bytes for fix in fixes(case)}


@pytest.mark.parametrize(
    ("case", "first", "never"),
    [
        (FULL, ["micro-batch", "fused-loss", "bf16", "checkpointing"], {"expandable", "leave-headroom"}),
        (replace(FULL, serving=True), ["leave-headroom", "smaller-graphs", "less-on-device"], TRAINS),
        (replace(FULL, serving=True, weights=70 * GIB), ["fewer-weights"], TRAINS | {"leave-headroom"}),
        (replace(FULL, traits={"generates"}), ["in-pieces", "fewer-weights"], TRAINS),
        (replace(FULL, traits={"generates", "trains"}), ["micro-batch"], {"in-pieces"}),
        (replace(FULL, traits={"batch of one"}), ["fused-loss"], {"micro-batch"}),
        (replace(FULL, shapes={"batch": 1}), ["fused-loss"], {"micro-batch"}),
        (
            replace(FULL, phase="optimizer"),
            ["fused-step", "optimizer-8bit"],
            {"micro-batch", "checkpointing"},
        ),
        (replace(FULL, phase="evaluation"), ["no-grad", "keep-reduced", "micro-batch"], {"optimizer-8bit"}),
        (replace(FULL, phase="setup"), ["shard", "offload"], {"micro-batch", "optimizer-8bit"}),
        (replace(FULL, shapes={"ranks": 1}), ["micro-batch"], {"shard"}),
        (
            device_case("does_not_fit", requested=30 * GIB, free=GIB, allocated=30 * GIB),
            ["shard", "offload"],
            {"micro-batch", "optimizer-8bit"},
        ),
        (device_case("does_not_fit", requested=90 * GIB), ["find-size"], {"expandable"}),
        (HOLES, ["expandable", "bucket"], TRAINS - {"watch"}),
        (replace(HOLES, expandable=True), ["bucket"], {"expandable"}),
        (replace(HOLES, traits={"no expandable segments"}), ["bucket"], {"expandable"}),
        (
            replace(HOLES, labels=("fragmentation", "does_not_fit")),
            ["expandable", "bucket", "micro-batch"],
            set(),
        ),
        (OUTSIDE, ["free-device", "own-context"], TRAINS),
        (
            replace(OUTSIDE, message=replace(OUTSIDE.message, device="cuda:3")),
            ["free-device"],
            {"own-context"},
        ),
        (replace(OUTSIDE, traits={"unified memory"}), ["page-cache"], {"free-device"}),
        (
            device_case(
                "other_process_or_outside_allocator",
                free=GIB,
                allocated=30 * GIB,
                reserved_unallocated=GIB,
                this_process=75 * GIB,
            ),
            ["watch"],
            {"free-device"},
        ),
        (device_case("allocator_limit", allowed=40 * GIB), ["raise-cap"], TRAINS),
        (sizes_case("allocator_limit", "mps", device="mps"), ["metal-limit"], {"micro-batch"}),
        (device_case("driver_refused_though_free", free=9 * GIB), ["check-driver", "split-request"], TRAINS),
        (sizes_case("driver_refused_though_free", "allocation"), ["check-driver", "less-on-device"], TRAINS),
        (device_case("absurd_request"), ["find-size"], TRAINS),
        (device_case("private_pools", private_pools=3 * GIB), ["fewer-graphs"], TRAINS),
        (device_case("system_memory_fallback", allocated=90 * GIB), ["no-fallback", "micro-batch"], set()),
        (device_case("unknown"), ["watch"], set()),
        (KILLED, ["prove-kill"], TRAINS),
        (replace(KILLED, traits={"builds"}), ["prove-kill", "build-jobs"], TRAINS),
        (KERNEL, ["fewer-workers", "lazy-data", "host-limit"], TRAINS),
        (replace(KERNEL, traits={"builds"}), ["build-jobs"], TRAINS),
        (text_case("host_memory_limit", "kernel-oom", comm="mysqld"), ["largest-process"], {"fewer-workers"}),
        (text_case("host_memory_limit", "notebook"), ["lazy-data"], {"fewer-workers"}),
        (text_case("host_alloc_failed", "python-alloc", "worker"), ["fewer-workers", "chunk-host"], TRAINS),
        (
            sizes_case("host_alloc_failed", "cpu-alloc", requested=64 * MIB),
            ["chunk-host"],
            {"largest-process"},
        ),
        (sizes_case("host_alloc_failed", "cpu-alloc", requested=MIB), ["largest-process"], {"chunk-host"}),
        (
            sizes_case("host_alloc_failed", "allocation", "failed"),
            ["largest-process", "less-on-host"],
            TRAINS,
        ),
        (text_case("shared_memory_exhausted", "shm"), ["larger-shm", "fewer-workers"], TRAINS),
        (text_case("not_memory", "not-memory", "disk"), [], TRAINS),
    ],
)
def test_what_helps(case: Case, first: Sequence[str], never: set[str]) -> None:
    chosen = keys(case)
    assert chosen[: len(first)] == list(first)
    assert bool(chosen) == bool(first)
    assert not never & set(chosen)


def test_the_logits_and_the_scores_of_a_request_are_what_is_saved() -> None:
    asked = 2 * GIB
    logits = replace(FULL, product=Product("the logits", ("batch", "seq", "vocab"), 4))
    assert saved(logits)["fused-loss"] == asked and saved(logits)["micro-batch"] == asked // 2
    scores = replace(FULL, product=Product("the scores", ("batch", "seq", "seq"), 2))
    assert saved(scores)["attention"] == asked and "bf16" not in saved(scores)


@pytest.mark.parametrize("ranks", [2, 8])
def test_what_states_and_activations_save_is_computed_from_the_sizes(ranks: int) -> None:
    params, layers, batch, length, width = 7 * 10**9, 32, 4, 2048, 4096
    sizes = {"params": params, "ranks": ranks, "layers": layers, "b": batch, "s": length, "h": width}
    told = saved(replace(FULL, shapes=sizes))
    assert told["checkpointing"] == 32 * (layers - 1) * batch * length * width
    assert told["optimizer-8bit"] == 6 * params
    assert told["shard"] == 8 * params - 8 * params // ranks
    assert told["offload"] == 8 * params


def test_the_largest_of_cheap_answers_comes_first() -> None:
    others = [{"pid": 7, "in_use": 20 * GIB}, {"pid": 8, "in_use": GIB}]
    fields = {"free": GIB, "allocated": 50 * GIB, "reserved_unallocated": 2 * GIB, "processes": others}
    case = replace(
        device_case("does_not_fit", this_process=53 * GIB, **fields),  # type: ignore[arg-type]
        labels=("does_not_fit", "fragmentation"),
    )
    first, second = fixes(case)[:2]
    assert (key(first), first.saves_bytes) == ("free-device", 21 * GIB)
    assert first.action.endswith("pid 7 (20.00 GiB), pid 8 (1024.00 MiB)")
    assert (key(second), second.saves_bytes) == ("expandable", 2 * GIB)


def test_an_engine_s_share_fits_next_to_what_others_hold() -> None:
    case = sizes_case("other_process_or_outside_allocator", "vllm", "startup", "cuda:0", free=65 * GIB)
    case = replace(case, message=replace(case.message, fields={"free": 65 * GIB, "total": 80 * GIB}))
    (share,) = [fix for fix in fixes(case) if key(fix) == "lower-share"]
    assert share.action.endswith(f"at most {int(100 * 65 / 80) / 100}")


@pytest.mark.parametrize("name", TEXTS)
def test_laws_of_the_fixes_of_any_text(name: str) -> None:
    explanation = explain(TEXTS[name], {"batch": 1})
    chosen = [key(fix) for fix in explanation.fixes]
    assert len(set(chosen)) == len(chosen), "each action once"
    assert "micro-batch" not in chosen, "one sample cannot be made smaller"
    assert all(fix.saves_bytes is None or fix.saves_bytes > 0 for fix in explanation.fixes)
    family = next((event.family for event in explanation.events if event.role == "cause"), "")
    if not family.startswith(("cuda", "hip")):
        assert "expandable" not in chosen
    if "in-pieces" in chosen or "leave-headroom" in chosen:
        assert not (TRAINS - {"watch"}) & set(chosen), "what trains nothing has no gradients"
