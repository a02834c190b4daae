"""Which kernel steps a tile, and in which thread."""

from __future__ import annotations

import threading

import pytest
import torch

from memtriage.treat.offload.arithmetic import Arithmetic, crew_size
from memtriage.treat.offload.kernel import FloatRoom, Hyper, Operands, Scaling, adamw
from memtriage.treat.offload.native.choice import available

HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, maximize=False)


@pytest.mark.parametrize(("threads", "computing"), [(1, 1), (2, 2), (7, 7), (8, 7), (9, 8), (16, 15)])
def test_from_eight_threads_on_one_is_left_for_the_copies(threads: int, computing: int) -> None:
    assert crew_size(threads) == computing


def operands(*lengths: int, dtype: torch.dtype = torch.float32) -> Operands:
    generator = torch.Generator().manual_seed(3)

    def random() -> list[torch.Tensor]:
        return [torch.rand(length, generator=generator) for length in lengths]

    return Operands(
        random(),
        [gradient.to(dtype) for gradient in random()],
        random(),
        random(),
        [torch.tensor(float(number + 1)) for number in range(len(lengths))],
        [torch.zeros(length, dtype=torch.bfloat16) for length in lengths],
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("lengths", "dtype"),
    [
        ((64, 128), torch.float32),
        ((5,), torch.bfloat16),
        ((200, 64, 3), torch.bfloat16),
        ((200, 64, 3), torch.float16),  # which the compiled kernel does not know
        ((), torch.float32),
    ],
)
def test_a_tile_is_stepped_as_by_torch(compiled: bool, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    library = available() if compiled else None
    if compiled and library is None:
        pytest.skip("there is no compiled kernel here")
    arithmetic = Arithmetic(FloatRoom(512, moments=False), library)
    assert (arithmetic.compiled, arithmetic.nbytes) == (compiled, 2048)
    ours, theirs = operands(*lengths, dtype=dtype), operands(*lengths, dtype=dtype)
    job = arithmetic.stepping(ours, HYPER, Scaling(ranks=2))
    if lengths:
        assert torch.equal(ours.masters[0], theirs.masters[0])
        with torch.no_grad():
            adamw(theirs, HYPER, Scaling(ranks=2), FloatRoom(512, moments=False))
    job.start()
    job.wait()
    arithmetic.close()
    arithmetic.close()
    for own, other in zip(
        (ours.masters, ours.exp_avgs, ours.exp_avg_sqs, ours.rounded),
        (theirs.masters, theirs.exp_avgs, theirs.exp_avg_sqs, theirs.rounded),
        strict=True,
    ):
        assert all(torch.equal(left, right) for left, right in zip(own, other, strict=True))


def test_functions_are_called_in_a_thread_of_their_own_without_gradients() -> None:
    arithmetic = Arithmetic(FloatRoom(64, moments=False), None)
    seen: list[tuple[str, bool]] = []

    def note() -> None:
        seen.append((threading.current_thread().name, torch.is_grad_enabled()))

    def fail() -> None:
        raise ValueError("of the function")

    job = arithmetic.calling(note)
    job.wait()
    assert seen == []
    job.start()
    job.wait()
    failing = arithmetic.calling(fail)
    failing.start()
    with pytest.raises(ValueError, match="of the function"):
        failing.wait()
    arithmetic.close()
    assert seen == [("memtriage-offload-kernel_0", False)]
