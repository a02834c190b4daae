"""The batches of an epoch are known in advance, and nothing of the program is advanced to know them."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from memtriage.observe.loaders import Epoch, LoaderHook

torch = pytest.importorskip("torch")
data = torch.utils.data

_LENGTHS = [7, 3, 9, 1, 5, 2, 8, 4, 6, 10, 11]


class Texts(data.Dataset):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        self.lengths = list(_LENGTHS)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.lengths[index],), index)


def padded(items: list[Any]) -> Any:
    return torch.nn.utils.rnn.pad_sequence(items, batch_first=True)


@pytest.fixture
def epochs() -> Iterator[list[Epoch]]:
    """Passes over loaders, as they begin."""
    begun: list[Epoch] = []
    hook = LoaderHook(begun.append)
    hook.install()
    yield begun
    hook.remove()


def sizes(epoch: Epoch) -> Any:
    """What is known of each batch; None where the order is not known."""
    plan = epoch.plan()
    return None if plan is None else plan.batches


def loader(**arguments: Any) -> Any:
    return data.DataLoader(Texts(), collate_fn=padded, **arguments)


class Drawn(data.Sampler):  # type: ignore[misc, name-defined]
    """A program's own sampler, in whose generator each index is drawn when it is due."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(9):
            yield int(torch.randint(len(_LENGTHS), ()))


class Delegating(data.Sampler):  # type: ignore[misc, name-defined]
    def __iter__(self) -> Iterator[int]:
        yield from data.RandomSampler(range(len(_LENGTHS)))


class Grouped(data.Sampler):  # type: ignore[misc, name-defined]
    """Batches of one length class each, known from the beginning."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[1, 3, 5], [0, 2], [10, 9, 8, 7], [4, 6]])


class Drawing(data.Sampler):  # type: ignore[misc, name-defined]
    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(4):
            yield torch.randint(len(_LENGTHS), (2,)).tolist()


def sampled(sampler: Any) -> dict[str, Any]:
    return {"batch_size": 3, "sampler": sampler}


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 2},
        {"batch_size": 3, "shuffle": True},
        {"batch_size": 3, "shuffle": True, "drop_last": True},
        {"batch_size": 1, "shuffle": True, "generator": torch.Generator()},
        {"batch_size": 2, "shuffle": True, "num_workers": 1, "prefetch_factor": 2},
        sampled(Delegating()),
        sampled(data.SubsetRandomSampler([1, 2, 3])) | {"expected": None},
        sampled(data.WeightedRandomSampler([0.1] * 11, 8)),
        sampled(data.distributed.DistributedSampler(range(11), 2, 1)),
        sampled([4, 3, 2, 1]),
        sampled(range(11)),
        {"batch_sampler": Grouped()},
        {"batch_sampler": [[0, 1], [2], [3, 4, 5]]},
    ],
)
def test_the_rest_of_an_epoch_is_known(epochs: list[Epoch], arguments: dict[str, Any]) -> None:
    understood = arguments.pop("expected", True)
    with torch.random.fork_rng():
        before = None
        given = []
        for number, batch in enumerate(loader(**arguments)):
            if number == 0:
                before = sizes(epochs[0])
                assert epochs[0].given == 1
            given.append(tuple(batch.shape))
    if not understood:
        assert before is None
        return
    assert before is not None
    items, longest = before
    assert list(zip(items.tolist(), longest.tolist(), strict=True)) == given


def test_the_order_is_the_same_with_and_without_a_look_at_it(epochs: list[Epoch]) -> None:
    def orders(look: bool) -> list[Any]:
        torch.manual_seed(7)
        got = []
        for _ in range(2):
            for batch in loader(batch_size=2, shuffle=True):
                if look:
                    assert sizes(epochs[-1]) is not None or len(got) % 6 == 5
                got.append(batch[:, 0].tolist())
        return [*got, torch.rand(1).item()]

    assert orders(True) == orders(False)


@pytest.mark.parametrize(
    "arguments",
    [
        sampled(Drawn()),
        {"batch_sampler": Drawing()},
        {"batch_size": None},
        sampled([np.int64(0), np.int64(1)]),
        sampled(range(1, 10)),
        {"batch_sampler": [(0, 1), (2, 3)]},
        {"batch_sampler": [[0, 1], [], [2]]},
    ],
)
def test_an_order_that_cannot_be_told_is_not_known(epochs: list[Epoch], arguments: dict[str, Any]) -> None:
    batches = iter(
        data.DataLoader([torch.zeros(length) for length in _LENGTHS], collate_fn=list, **arguments)
    )
    (epoch,) = epochs
    next(batches)
    plan = epoch.plan()
    size = None if "batch_sampler" in arguments else arguments.get("batch_size", 1)
    if size is None:
        assert plan is None
    else:
        assert plan is not None and (plan.batches, plan.size) == (None, size)
        assert plan.lengths.tolist() == _LENGTHS
    del batches


@pytest.mark.parametrize(("replacement", "first", "count"), [(False, 11, 22), (True, 32, 70)])
def test_what_is_drawn_next_in_an_epoch_is_not_taken_for_the_first(
    epochs: list[Epoch], replacement: bool, first: int, count: int
) -> None:
    sampler = data.RandomSampler(range(11), replacement=replacement, num_samples=count)
    known = []
    for _ in loader(batch_size=1, sampler=sampler):
        known.append(sizes(epochs[0]) is not None)
    assert known == [True] * first + [False] * (count - first)


def test_items_that_are_not_in_the_data_set_are_not_looked_up(epochs: list[Epoch]) -> None:
    batches = iter(loader(batch_size=1, sampler=[0, 1, 99]))
    next(batches)
    assert sizes(epochs[0]) is None


def test_items_of_one_length_have_no_plan(epochs: list[Epoch]) -> None:
    for items in ([torch.zeros(3) for _ in range(8)], [object() for _ in range(8)]):
        batches = iter(data.DataLoader(items, batch_size=2, collate_fn=list))  # type: ignore[arg-type]
        next(batches)
        assert epochs[-1].plan() is None
    batches = iter(data.DataLoader([torch.zeros(3 + at) for at in range(8)], batch_size=2, collate_fn=list))
    next(batches)
    assert epochs[-1].plan() is not None


def test_nothing_is_kept_alive(epochs: list[Epoch]) -> None:
    for _ in loader(batch_size=4):
        pass
    gc.collect()
    (epoch,) = epochs
    assert epoch.given is None and sizes(epoch) is None
    assert not epoch.is_of(epoch)


def test_passes_over_one_loader_are_recognized(epochs: list[Epoch]) -> None:
    first, second = loader(batch_size=4), loader(batch_size=4)
    kept = [iter(first), iter(second), iter(first)]
    assert [epochs[0].is_of(epoch) for epoch in epochs] == [True, False, True]
    del kept


def test_the_class_is_left_as_it_was() -> None:
    before = data.DataLoader.__iter__
    hook = LoaderHook(lambda epoch: None)
    hook.install()
    assert data.DataLoader.__iter__ is not before
    hook.remove()
    hook.remove()
    assert data.DataLoader.__iter__ is before


def test_an_error_of_the_sampler_reaches_the_program_as_without_the_hook(epochs: list[Epoch]) -> None:
    class Broken(data.Sampler):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[int]:
            raise ValueError("no order")

    def frames() -> list[str]:
        try:
            iter(loader(batch_sampler=Broken()))
        except ValueError as error:
            return [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        raise AssertionError

    watched = frames()
    assert epochs == []
    assert "iterate" not in watched and watched[1] == "__iter__"
