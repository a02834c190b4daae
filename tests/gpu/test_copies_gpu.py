"""A copy of a process that uses CUDA takes its census, and never calls CUDA itself."""

from __future__ import annotations

import os
import subprocess

import msgspec
import pytest

from memtriage.model.asked import Answer
from memtriage.session.remote import take
from memtriage.session.remote.take import answer_in_copy, take_answer

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


def train(steps: int, copies: bool) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).cuda()
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for _ in range(steps):
        loss = model(torch.randn(32, 256, device="cuda")).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        copy = answer_in_copy({}, None, follow=True) if copies else None
        losses.append(loss.item())
        if copies:
            assert copy is not None and copy.result(120)
    return losses


def test_training_goes_on_to_the_bit() -> None:
    assert train(12, copies=True) == train(12, copies=False)


def test_a_copy_sees_what_the_process_sees_and_uses_no_gpu() -> None:
    pinned = torch.zeros(3_000_001, pin_memory=True)
    kept = [torch.zeros(1_000_003, device="cuda") for _ in range(3)]
    copy = answer_in_copy({}, None, follow=True)
    assert copy is not None
    listed = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(copy.pid) not in listed.stdout.split()
    inside = take_answer({}, None, follow=True)
    text = copy.result(120)
    assert text is not None and inside is not None and len(kept) == 3
    copied = msgspec.json.decode(text, type=Answer)
    assert copied.pid == os.getpid()
    rows = [(row.device, row.holder, row.count, row.bytes) for row in copied.holders]
    assert rows == [(row.device, row.holder, row.count, row.bytes) for row in inside.holders]
    for ledger, other in zip(copied.ledgers, inside.ledgers, strict=True):
        assert ledger.device == other.device
        assert sum(row.bytes for row in ledger.rows) == ledger.total
        tensors = [
            {row.row: row.bytes for row in each.rows if "pinned" in row.row} for each in (ledger, other)
        ]
        assert tensors[0] == tensors[1]
    assert pinned.is_pinned()


@pytest.mark.parametrize("pinned_by", ["cudaHostAlloc", "cudaHostRegister"])
def test_pinned_memory_stays_that_of_the_gpu(pinned_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU reads what the program writes after a copy was made, and the reverse: no page moved."""
    size, registers = 8 << 30, pinned_by == "cudaHostRegister"
    pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=not registers)
    runtime = torch.cuda.cudart()
    if registers:
        assert int(runtime.cudaHostRegister(pinned.data_ptr(), size, 0)) == 0
    on_gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
    try:
        first = answer_in_copy({}, None, follow=True)
        assert (first is None) == registers and (first is None or first.result(120))
        monkeypatch.setattr(take, "_COPIED_AT_ONCE", size)
        for number in (1, 3):
            copy = answer_in_copy({}, None, follow=True)
            assert copy is not None
            pinned.fill_(number)
            on_gpu.copy_(pinned, non_blocking=True)
            assert on_gpu.min() == on_gpu.max() == number
            on_gpu.fill_(number + 1)
            pinned.copy_(on_gpu, non_blocking=True)
            torch.cuda.synchronize()
            assert pinned.min() == pinned.max() == number + 1
            assert copy.result(120)
            assert pinned.min() == pinned.max() == number + 1
    finally:
        if registers:
            runtime.cudaHostUnregister(pinned.data_ptr())
