"""What scripts that load, train and save need on the host."""

from types import SimpleNamespace

import pytest
import torch

from memtriage.prediction.host.memory import COMMUNICATION
from memtriage.prediction.host.program import HostNotes
from memtriage.prediction.operators import facts

MIB = 1 << 20
NET = """
import io
import torch
from torch import nn

def network():
    return nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)])
"""
WEIGHT = 16 * MIB
MODEL = 4 * WEIGHT
SLACK = MIB // 2
"""malloc's headers and pages, and small tensors."""


def near(size):
    return pytest.approx(size, abs=SLACK)


def test_loading_has_the_file_beside_the_model(host_of):
    host = host_of(
        NET
        + """
torch.save(network().state_dict(), "net.pt")
model = network()
model.load_state_dict(torch.load("net.pt"))
"""
    ).host
    assert host["parameter"] == near(MODEL)
    assert host["loaded"] == near(MODEL)
    assert host["libraries"] == 3000
    assert host["peak"] == sum(size for kind, size in host.items() if kind != "peak")


def test_what_is_assigned_from_a_mapped_file_costs_its_pages_only(host_of):
    host = host_of(
        NET
        + """
with torch.device("meta"):
    model = network()
torch.save({name: torch.ones(2048, 2048) for name in model.state_dict()}, "net.pt")
model.load_state_dict(torch.load("net.pt", mmap=True), assign=True)
model.to(torch.bfloat16)
"""
    ).host
    assert host["peak"] == near(MODEL + MODEL // 2 + 3000)


def test_training_on_the_host_names_gradients_and_states(host_of):
    predicted = host_of(
        NET
        + """
model = network()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(4, 2048)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    host = predicted.host
    assert host["parameter"] == near(MODEL)
    assert host["gradient"] == near(MODEL)
    assert host["optimizer state"] == near(2 * MODEL)
    assert predicted.peak_reserved == predicted.outside_allocator == 0


def test_a_script_runs_on_to_what_it_saves_after_its_loader(host_of):
    predicted = host_of(
        NET
        + """
from torch.utils.data import DataLoader, TensorDataset
model = network()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
read = 0
for epoch in range(3):
    for (batch,) in DataLoader(TensorDataset(torch.randn(4000, 2048)), batch_size=4):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        read += 1
print("batches", read)
buffer = io.BytesIO()
torch.save(model.state_dict(), buffer)
"""
    )
    assert predicted.host["copies for saving"] == near(MODEL)
    assert len(predicted.steps) == 2


def test_a_script_that_fails_after_its_steps_says_so(host_of):
    predicted = host_of(
        NET
        + """
model = network()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    model(torch.randn(4, 2048)).sum().backward()
    optimizer.step()
raise RuntimeError("no evaluation here")
"""
    )
    assert any("it raised RuntimeError: no evaluation here" in note for note in predicted.notes)


def test_a_copy_on_the_gpu_is_saved_by_way_of_the_host(host_of):
    host = host_of(
        NET + 'model = network().cuda()\ntorch.save(model.state_dict(), "net.pt")\n', gpu="h100"
    ).host
    assert host["peak"] == near(
        MODEL + 3000
    )  # the model before it was moved; of copies there is one at a time
    assert "copies for saving" not in host or host["copies for saving"] == near(WEIGHT)


class Noted:
    """Stands for the host's memory: notes what it is told, with the sizes of storages."""

    def __init__(self):
        self.said = []

    def allocate(self, size, kind):
        assert kind == COMMUNICATION
        self.said.append(("allocate", size))
        return len(self.said)

    def free(self, block):
        self.said.append(("free", self.said[block - 1][1]))

    def meet(self):
        self.said.append(("meet",))

    def use(self, storage, written):
        self.said.append(("write" if written else "read", storage.nbytes()))

    def see(self, storage, used):
        self.said.append(("make" if used else "make room", storage.nbytes()))

    def resized(self, storage):
        self.said.append(("resize", storage.nbytes()))


def collective(name, *arguments):
    schema = SimpleNamespace(name=name, arguments=[SimpleNamespace(name=one) for one in arguments])
    return SimpleNamespace(_schema=schema)


GATHER = collective("c10d::allgather_", "output_tensors", "input_tensors", "async_op")


def told(*calls):
    notes = HostNotes(Noted())
    for func, args in calls:
        notes.collective(func, args)
    return notes.memory.said


@pytest.mark.parametrize("waits", [True, False])
def test_gloo_copies_the_whole_until_it_is_waited_for_or_the_next_comes(waits):
    parts = [torch.zeros(4) for _ in range(3)]
    first = told((GATHER, ([parts], [parts[0]], not waits)))
    assert first[:2] == [("meet",), ("allocate", 48)]
    assert first[2:] == [("free", 48)] * waits
    waited = told(
        (GATHER, ([parts], [parts[0]], not waits)), (collective("_c10d_functional::wait_tensor"), ())
    )
    assert waited == [("meet",), ("allocate", 48), ("free", 48)]
    after = told((GATHER, ([parts], [parts[0]], True)), (GATHER, ([parts[:2]], [parts[0]], True)))
    assert after == [("meet",), ("allocate", 48), ("free", 48), ("meet",), ("allocate", 32)]


def test_functional_gathers_are_copied_for_all_ranks_of_their_group():
    gather = collective("_c10d_functional::all_gather_into_tensor", "input", "group_size", "group_name")
    scatter = collective("_c10d_functional::reduce_scatter_tensor", "input", "op", "group_size", "group_name")
    assert told((gather, (torch.zeros(4), 3, "0"))) == [("meet",), ("allocate", 48)]
    assert told((scatter, (torch.zeros(12), "sum", 3, "0"))) == [("meet",), ("allocate", 48)]


def test_ranks_meet_in_every_collective_but_few_are_copied():
    assert told((collective("c10d::allreduce_", "tensors"), ([torch.zeros(4)],))) == [("meet",)]
    assert told((collective("c10d::barrier"), ())) == [("meet",)]


def test_operators_write_read_and_make_memory_of_the_host():
    aten = torch.ops.aten
    small, large, gpu = torch.zeros(2), torch.zeros(4), torch.empty(8, device="meta")

    def said(func, inputs=(), targets=(), outputs=()):
        notes = HostNotes(Noted())
        notes.operator(facts(func), list(inputs), list(targets), list(outputs))
        return notes.memory.said

    assert said(aten.relu.default, [small], [], [large]) == [("read", 8), ("make", 16)]
    assert said(aten.empty.memory_format, [], [], [large]) == [("make room", 16)]
    assert said(aten.add_.Tensor, [small], [large]) == [("write", 16), ("read", 8)]
    assert said(aten.resize_.default, [], [large]) == [("write", 16), ("resize", 16)]
    assert said(aten.view.default, [small], [], [small]) == [("make", 8)]
    assert said(aten.relu.default, [gpu], [gpu], [gpu]) == []
    assert said(aten.relu.default, [small.to_sparse()], [], [small.to_sparse()]) == []


def test_the_state_of_an_optimizer_that_works_in_a_thread_is_counted(host_of):
    predicted = host_of(
        NET
        + """
import memtriage

model = network().bfloat16().cuda()
optimizer = memtriage.OffloadedAdamW(model.parameters(), ring_depth=2, pin_memory=False)
for step in range(3):
    model(torch.ones(8, 2048, device="cuda").bfloat16()).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    assert predicted.by_owner["parameter"] == MODEL // 2
    assert predicted.host["optimizer state"] == near(3 * MODEL)


@pytest.mark.parametrize(
    ("pins", "held", "copied"),
    [
        ("torch.zeros(SIZE).pin_memory()", 2 * WEIGHT, WEIGHT + MIB),  # both are there while it is copied
        ("torch.empty(SIZE, pin_memory=True)", 2 * WEIGHT, 0),
        ("torch.empty(SIZE, pin_memory=True).pin_memory()", 2 * WEIGHT, 0),
        ("torch.zeros(SIZE)", WEIGHT + MIB, 0),
    ],
)
def test_pinned_tensors_take_a_power_of_two(host_of, pins, held, copied):
    predicted = host_of(
        f"""
import torch

SIZE = {(WEIGHT + MIB) // 4}
kept = {pins}
assert kept.is_pinned() is {"pin" in pins}
torch.nn.Linear(8, 8).cuda()(torch.ones(1, 8, device="cuda"))
""",
        gpu="h200",
    )
    assert predicted.host["peak"] == near(held + copied + 3000)
