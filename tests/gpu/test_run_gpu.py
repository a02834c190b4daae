"""`memtriage run` on a real GPU: a real model's ledger, a leak, the moments of an out-of-memory error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from memtriage.store.reader import RankRecord, read_rank
from support.context_programs import KEEPS_IN_CONTEXT

LLAMA = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
        num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=1024,
    )
    model = LlamaForCausalLM(config).to(device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    print("parameters", sum(p.numel() for p in model.parameters()))
    for step in range(14):
        optimizer.zero_grad()
        ids = torch.randint(0, 32_000, (4, 512), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
"""

LEAK = (
    """
    import torch
    from torch import nn
"""
    + KEEPS_IN_CONTEXT
    + """
    def main():
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        losses = {"lm": []}
        for step in range(24):
            x = torch.randn(1024, 256, device="cuda")
            loss = Wrap.apply(x, (model(x) ** 2).mean())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses["lm"].append(KEEP)

    main()
"""
)

LENGTHENING = """
    import torch
    from torch import nn

    def main():
        model = nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        kept = []
        for step in range(60):
            rows = 4096 + 256 * LONGER
            outputs = []
            for layer in range(8):
                outputs.append(model(torch.randn(rows, 1024, device="cuda")))
                if layer % 4 == 1:
                    kept.append(torch.zeros(3 << 17, device="cuda"))
            sum(output.square().mean() for output in outputs).backward()
            optimizer.step()
            optimizer.zero_grad()
            del outputs

    main()
"""


def run(tmp_path: Path, source: str, *, expect: int | None = 0) -> dict[str, Any]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(source))
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "memtriage", "run", "-o", str(tmp_path / "runs"), "--json", str(out)]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=300)
    print(done.stderr[-6000:])
    if expect is not None:
        assert done.returncode == expect, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_a_llama_s_ledger_closes_and_names_its_owners(tmp_path: Path) -> None:
    report = run(tmp_path, LLAMA)
    assert report["verdict"] == "clean", report["findings"]
    rows = report["ledger"]["cuda:0"]
    total = sum(row["bytes"] for row in rows)
    print(json.dumps(rows, indent=1))
    unexplained = sum(abs(row["bytes"]) for row in rows if row["row"] == "unexplained")
    assert unexplained <= 0.005 * total
    requested = [row for row in rows if row["row"] == "requested"]
    unnamed = sum(row["bytes"] for row in rows if row["row"] == "c++ only" and not row["owner"])
    named = sum(row["bytes"] for row in requested) + sum(
        row["bytes"] for row in rows if row["row"] == "c++ only" and row["owner"]
    )
    assert named >= 0.995 * (named + unnamed)
    owners = {row["owner"] for row in requested}
    assert {"parameter", "gradient", "optimizer state"} <= owners
    host = report["ledger"]["host"]
    rss = sum(row["bytes"] for row in host)
    assert sum(abs(row["bytes"]) for row in host if row["row"] == "unexplained") <= 0.03 * rss


def test_a_leak_is_named_and_its_cure_is_clean(tmp_path: Path) -> None:
    report = run(tmp_path, LEAK.replace("KEEP", "loss"))
    assert report["verdict"] == "leak"
    finding = report["findings"][0]
    assert finding["device"] == "cuda:0"
    assert finding["holder"] == "frame main(): losses['lm'][*] -> grad_fn WrapBackward -> ctx.context[1]"
    assert finding["allocated_at"] == "train.py:8 in forward"
    assert finding["bytes_per_step"] == pytest.approx(1024 * 256 * 4 * 1, rel=1.1)
    assert "detach" in finding["fix"]
    (tmp_path / "cured").mkdir()
    cured = run(tmp_path / "cured", LEAK.replace("KEEP", "loss.detach()"))
    assert cured["verdict"] == "clean", cured["findings"]


PINNED = """
    import torch

    def main():
        model = torch.nn.Linear(256, 256).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        staged = []
        for _ in range(60):
            staged.append(torch.randn(4096, 256, pin_memory=True))
            model(staged[-1].cuda(non_blocking=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    main()
"""


@pytest.mark.parametrize("settings", ["", "pinned_use_cuda_host_register:True"])
def test_page_locked_memory_that_is_kept_is_a_leak(
    tmp_path: Path, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no malloc counter, unless torch takes it from malloc and registers it."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    report = run(tmp_path, PINNED)
    (leak,) = (finding for finding in report["findings"] if finding["kind"] == "leak")
    assert (leak["device"], leak["holder"]) == ("cpu", "frame main(): staged[*]")
    assert leak["bytes_per_step"] == pytest.approx(4096 * 256 * 4, rel=0.1)


FULL = """
    import torch
    from torch import nn

    def main():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(3 * 2**30 / total)
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        kept = []
        while True:
            x = torch.randn(16_384, 1024, device="cuda")  # eight activations of 64 MiB come and go
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(torch.zeros(8 * 2**20, device="cuda"))  # 32 MiB
            del x, loss

    main()
"""


def test_memory_is_full_at_the_step_that_was_told(tmp_path: Path) -> None:
    report = run(tmp_path, FULL, expect=1)
    assert report["verdict"] == "out_of_memory"
    (path,) = (tmp_path / "runs").glob("**/*.jsonl")
    projected = [
        int(match[1].replace(",", "")) for match in map(_TOLD.search, _evidence(read_rank(path))) if match
    ]
    assert projected[0] == pytest.approx(report["steps"], abs=2)


_TOLD = re.compile(r"is full at step ([\d,]+)")


def _evidence(record: RankRecord) -> list[str]:
    return [text for finding in record.interim_findings for text in finding.evidence]


COUNTERS = """
    import json, os, sys, torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    calls = 0

    def block(layer, x):
        global calls
        calls += 1
        return torch.relu(layer(x))

    def main():
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6)).cuda()
        optimizer = torch.optim.AdamW(layers.parameters())
        seen = []
        for step in range(14):
            x = torch.randn(256 + 8 * (step % 3), 512, device="cuda")
            for layer in layers:
                x = checkpoint(block, layer, x, use_reentrant=False)
            x.sum().backward()
            seen.append(torch.cuda.memory_allocated())
            optimizer.step()
            seen.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
            optimizer.zero_grad()
        print(json.dumps({"seen": seen, "calls": calls, "reserved": torch.cuda.memory_reserved()}))

    main()
"""


def test_memory_is_the_same_to_the_byte_and_checkpoints_run_as_often(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(COUNTERS))
    env = {**os.environ, "MEMTRIAGE_DIR": str(tmp_path / "runs")}
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    watched = subprocess.run(
        [sys.executable, "-m", "memtriage", "run", str(script)],
        capture_output=True, text=True, check=True, env=env,
    )  # fmt: skip
    assert json.loads(watched.stdout) == json.loads(plain.stdout)


OOM = """
    import torch
    from torch import nn

    def evaluate(model, x):
        with torch.no_grad():
            for layer in model:
                x = layer(x)
            return x.repeat(BIG, 1)

    def main():
        torch.cuda.set_per_process_memory_fraction(FRACTION)
        model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(16)]).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(6):
            rows = ROWS
            x = torch.randn(rows, 4096, device="cuda")
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            EVALUATE

    main()
"""
GIB = 1 << 30


@pytest.mark.parametrize(
    ("limit", "rows", "evaluate", "entry", "phase"),
    [
        (2 * GIB, "1024", "", "M14", "backward"),
        (3 * GIB, "64", "", "M17", "optimizer"),
        (8 * GIB, "64", "evaluate(model, x)", "M15", "evaluation"),
        (8 * GIB, "64 if step < 4 else 65536", "", "M16", "forward"),
    ],
)
def test_when_memory_ran_out(
    tmp_path: Path, limit: int, rows: str, evaluate: str, entry: str, phase: str
) -> None:
    import torch

    fraction = limit / torch.cuda.get_device_properties(0).total_memory
    source = OOM.replace("FRACTION", f"{fraction:.6f}").replace("ROWS", rows)
    source = source.replace("EVALUATE", evaluate or "pass").replace("BIG", "10_000")
    report = run(tmp_path, source, expect=1)
    assert report["verdict"] == "out_of_memory"
    finding = report["findings"][0]
    assert finding["kind"] == "out_of_memory"
    assert (finding["playbook"], finding["phase"]) == (entry, phase), finding
    assert finding["bytes"]
    assert report["exception"].startswith("OutOfMemoryError")
    assert report["ledger"]["cuda:0"]


@pytest.mark.parametrize("longer", ["step", "0"])
def test_growing_fragmentation_is_named_with_its_cure(tmp_path: Path, longer: str) -> None:
    """Small results between activations that get longer keep the segments of shorter ones."""
    report = run(tmp_path, LENGTHENING.replace("LONGER", longer))
    found = [finding for finding in report["findings"] if finding["kind"] == "fragmentation"]
    assert bool(found) is (longer == "step")
    for finding in found:
        assert finding["device"] == "cuda:0"
        course, pinned, compaction = finding["evidence"]
        assert course.startswith("reserved rose from")
        assert "main(): kept[*]" in pinned
        assert re.search(r"at the end of step \d+ would move .* in \d+ storages", compaction)


LONG_BATCH = """
    import random

    import torch
    from torch.nn.utils.rnn import pad_sequence
    from torch.utils.data import DataLoader, Dataset
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    draw = random.Random(0)

    class Texts(Dataset):
        def __init__(self):
            self.lengths = [draw.randint(64, 400) for _ in range(640)]
            self.lengths[LONGEST] = 1000

        def __len__(self):
            return len(self.lengths)

        def __getitem__(self, index):
            return torch.zeros(self.lengths[index], dtype=torch.int64)

    def padded(texts):
        return pad_sequence(texts, batch_first=True)

    def main():
        torch.cuda.set_per_process_memory_fraction(LIMIT / torch.cuda.get_device_properties(0).total_memory)
        model = GPT2LMHeadModel(GPT2Config(n_layer=4)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for step, ids in enumerate(DataLoader(Texts(), batch_size=8, collate_fn=padded)):
            if step == STEPS:
                break
            ids = ids.cuda()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    main()
"""


@pytest.mark.parametrize(("gib", "dies"), [(6, True), (24, False)])
def test_the_longest_batch_is_reported_before_it_comes_and_only_if_it_will_not_fit(
    tmp_path: Path, gib: int, dies: bool
) -> None:
    longest, batch = 500, 8
    source = LONG_BATCH.replace("LIMIT", str(gib << 30)).replace("LONGEST", str(longest))
    early = run(tmp_path, source.replace("STEPS", "40"))
    found = [finding for finding in early["findings"] if finding["kind"] == "out_of_memory"]
    assert [finding["projection"]["step"] for finding in found] == [longest // batch + 1] * dies
    whole = run(tmp_path, source.replace("STEPS", "80"), expect=int(dies))
    assert (whole["verdict"] == "out_of_memory") is dies
    assert whole["steps"] == (longest // batch if dies else 80)
