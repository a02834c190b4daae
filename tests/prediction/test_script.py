"""Whole scripts are traced until they have made their steps."""

import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memtriage
from memtriage.model.units import size
from memtriage.prediction.api import predict_program
from memtriage.prediction.build import BuildError
from memtriage.prediction.script import Script

PROGRAMS = Path(__file__).parent / "programs"
WIDTH = 128
BATCH = 64
FP32 = 4
PARAMETERS = 2 * (WIDTH * WIDTH + WIDTH) * FP32

HEAD = f"""
import sys
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"

def network():
    return nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.ReLU(), nn.Linear({WIDTH}, {WIDTH})).to(device)

def batch():
    return torch.randn({BATCH}, {WIDTH}).to(device)
"""
LOOP = """
def main(count):
    model = network()
    optimizers = [torch.optim.AdamW(part.parameters()) for part in PARTS(model)]
    for step in range(count):
        loss = model(batch()).square().mean()
        loss.backward()
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()
    print("trained")

if __name__ == "__main__":
    main(int(sys.argv[1]))
"""
ONE = LOOP.replace("PARTS(model)", "[model]")
TWO = LOOP.replace("PARTS(model)", "[model[0], model[2]]")


@pytest.fixture
def script(tmp_path):
    def write(text):
        file = tmp_path / "train.py"
        file.write_text(HEAD + text)
        return str(file)

    return write


def build_with(parts):
    """The same program as a build function."""

    def build(device):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(device)
        optimizers = [torch.optim.AdamW(part.parameters()) for part in parts(model)]

        def step():
            loss = model(torch.randn(BATCH, WIDTH).to(device)).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()

        return model, optimizers, step

    return build


def build_of(text):
    """The program of a script as a build function, whose steps are what its loop does."""
    before, _, loop = text.partition("for step in ")
    step = compile(textwrap.dedent(loop.partition("\n")[2]), "step", "exec")

    def build(device):
        space = {}
        exec(HEAD + before, space)
        optimizer = space.get("optimizer") or torch.optim.SGD(space["model"].parameters())
        return space["model"], optimizer, lambda: exec(step, space)

    return build


LARGE_FIRST = """
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in (64 * BATCHES, 64, 64):
    model(torch.randn(rows, 128).to(device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("batches", "said"), [("1", False), ("64", True)])
def test_a_first_step_with_a_higher_peak_is_named(script, batches, said):
    prediction = predict_program(Script(script(LARGE_FIRST.replace("BATCHES", batches))), steps=3)
    first = f"step 1 allocates {size(prediction.steps[0].peak_allocated)} at its peak"
    assert any(note.startswith(first) for note in prediction.notes) is said


@pytest.mark.parametrize(
    ("text", "count", "goes_on"),
    [(ONE, "1000", True), (ONE, "3", True), (ONE, "2", False), (TWO, "1000", True), (TWO, "2", False)],
)
def test_a_script_has_the_peak_of_its_build_function(script, text, count, goes_on, capsys):
    prediction = predict_program(Script(script(text), [count]))
    parts = (lambda model: [model]) if text is ONE else (lambda model: [model[0], model[2]])
    expected = predict_program(build_with(parts))
    assert prediction.peak_allocated == expected.peak_allocated
    assert prediction.peak_reserved == expected.peak_reserved
    assert prediction.peak_phase == expected.peak_phase
    assert prediction.by_owner == expected.by_owner
    assert ("trained" in capsys.readouterr().out) is not goes_on
    # What the script's own variables keep alive is there at the end of a step: here the loss.
    for step, other in zip(prediction.steps, expected.steps, strict=True):
        assert 0 <= step.end_allocated - other.end_allocated <= 512


@pytest.mark.parametrize("explain", [False, True])
def test_a_compiled_model_has_the_peak_of_a_compiled_function(script, explain):
    as_model = ONE.replace("model = network()", "model = torch.compile(network(), fullgraph=True)")
    as_function = ONE.replace("model(batch())", "compiled(batch())").replace(
        "model = network()", "model = network()\n    compiled = torch.compile(lambda given: model(given))"
    )
    prediction, expected = (
        predict_program(Script(script(text), ["1000"]), explain=explain) for text in (as_model, as_function)
    )
    assert prediction.peak_allocated == expected.peak_allocated
    assert prediction.peak_reserved == expected.peak_reserved


def test_a_single_step_can_be_asked_for(script):
    prediction = predict_program(Script(script(ONE), ["1"]), steps=1)
    assert prediction.by_owner["parameter"] == PARAMETERS


def test_optimizers_inside_backward_make_steps(script):
    text = """
model = network()
optimizers = {each: torch.optim.SGD([each], lr=0.1, momentum=0.9) for each in model.parameters()}

def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()

for parameter in optimizers:
    parameter.register_post_accumulate_grad_hook(update)
for step in range(1000):
    model(batch()).sum().backward()
"""
    prediction = predict_program(Script(script(text)))
    assert len(prediction.steps) == 2
    assert prediction.by_owner["optimizer state"] == PARAMETERS
    # Each gradient goes as soon as it is used.
    assert prediction.by_owner.get("gradient", 0) < PARAMETERS


def test_an_optimizer_that_runs_backward_itself_makes_steps(script):
    text = """
model = network()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
x = batch()

def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss

for step in range(1000):
    optimizer.step(closure)
"""
    found, expected = (predict_program(each, steps=3) for each in (Script(script(text)), build_of(text)))
    # Gradients that the next step frees before it allocates anything count as freed by the step before.
    for step, other in zip(found.steps, expected.steps, strict=True):
        assert (step.peak_allocated, step.peak_reserved) == (other.peak_allocated, other.peak_reserved)
    assert found.by_owner["optimizer state"] > 2 * PARAMETERS


LOADED = """
import queue, threading

batches = queue.Queue(1)

def load():
    while True:
        batches.put(batch())

threading.Thread(target=load, daemon=True).start()
model = network()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1000):
    inputs = batches.get()
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_threads_allocate_is_traced(script):
    alone = LOADED.replace("threading.Thread(target=load, daemon=True).start()", "")
    found, expected = (
        predict_program(Script(script(text))) for text in (LOADED, alone.replace("batches.get()", "batch()"))
    )
    # One waits in the queue and one to be put there, if the thread was as quick.
    waiting = found.peak_allocated - expected.peak_allocated
    assert waiting in {count * BATCH * WIDTH * FP32 for count in range(3)}


def test_training_in_a_thread_has_the_same_peak(script):
    """What ends the script when its last step is done is raised in that thread."""
    in_thread = ONE.replace(
        "    main(int(sys.argv[1]))",
        "    import threading\n"
        "    trains = threading.Thread(target=main, args=[int(sys.argv[1])])\n"
        "    trains.start()\n"
        "    trains.join()",
    )
    found, expected = (predict_program(Script(script(text), ["1000"])) for text in (in_thread, ONE))
    assert (found.peak_allocated, found.peak_reserved) == (expected.peak_allocated, expected.peak_reserved)
    assert found.by_owner == expected.by_owner


def test_a_thread_that_cannot_be_traced_ends_the_script(script):
    text = """
import queue, threading

batches = queue.Queue()
threading.Thread(target=lambda: batches.put(nn.Linear(128, 128)(batch())), daemon=True).start()
batches.get()
"""
    with pytest.raises(BuildError, match="send inputs and every part of the model"):
        predict_program(Script(script(text)))


def test_a_thread_of_an_earlier_trace_dies_alone(script, monkeypatch):
    """It was about to load when that trace ended: tensors are no longer faked for it."""
    shared = SimpleNamespace(next_trace=threading.Event(), died=[])
    monkeypatch.setitem(sys.modules, "shared", shared)
    monkeypatch.setattr(threading, "excepthook", lambda died: shared.died.append(died.exc_type))
    loads = """
import threading, shared

def load():
    shared.next_trace.wait()
    batch()

shared.loads = threading.Thread(target=load, daemon=True)
shared.loads.start()
"""
    dies = "import shared\nshared.next_trace.set()\nshared.loads.join()\n"
    for before in (loads, dies):
        predict_program(Script(script(before + ONE), ["1000"]), steps=1)
    assert shared.died == [NotImplementedError]


def test_what_a_script_does_after_training_is_not_run(script):
    text = ONE.replace('print("trained")', "raise OSError")
    predict_program(Script(script(text), ["2"]))


def test_the_process_is_as_before(script):
    before = list(sys.argv), list(sys.path), sys.modules["__main__"]
    predict_program(Script(script(ONE), ["1000"]))
    assert (list(sys.argv), list(sys.path), sys.modules["__main__"]) == before


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (ONE, ["1"], "ended after 1 training step; expected at least 2"),
        (ONE, [], r"IndexError at .*train\.py:\d+"),
        ("sys.exit(3)", [], "exited with status 3 before it ran a model"),
        (
            ONE.replace("network()", "nn.Linear(128, 128)").replace("batch()", "batch().cpu()"),
            ["9"],
            "ran no model on the GPU",
        ),
        (
            "import not_installed",
            [],
            r"ModuleNotFoundError at .*train\.py:13: No module named 'not_installed'$",
        ),
        ("open('missing.txt')", [], r"FileNotFoundError at .*train\.py:13: .*'missing.txt'$"),
        ("if True print(1)", [], r"SyntaxError at .*train\.py:13: .*$"),
        ("{}['batch']", [], r"KeyError at .*train\.py:13: 'batch'$"),
        ("undefined", [], r"NameError at .*train\.py:13: name 'undefined' is not defined$"),
    ],
)
def test_a_script_that_cannot_be_predicted(script, text, arguments, said):
    with pytest.raises(BuildError, match=said):
        predict_program(Script(script(text), arguments))


def test_a_script_that_is_not_there():
    with pytest.raises(BuildError, match=r"no such file: 'nowhere\.py'"):
        Script("nowhere.py")


def test_any_number_of_steps_has_one_peak_with_two_optimizers(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # the program sets it for its process
    program = str(PROGRAMS / "gan.py")
    predictions = [predict_program(Script(program, ["--batch", "8"]), steps=steps) for steps in (2, 3, 5)]
    assert len({(each.peak_allocated, each.peak_reserved) for each in predictions}) == 1
    assert [len(each.steps) for each in predictions] == [2, 3, 5]
    assert predictions[0].peak_allocated == max(step.peak_allocated for step in predictions[2].steps[1:])


def test_the_highest_step_after_the_first_is_reported(script):
    text = """
model = network()
optimizer = torch.optim.SGD(model.parameters())
for size in (99, 500, 1):
    model(torch.randn(1000 * size, 128, device=device)).sum().backward()
    optimizer.step()
"""
    prediction = predict_program(Script(script(text)), steps=3)
    first, second, third = (step.peak_allocated for step in prediction.steps)
    assert first < second > third
    assert prediction.peak_allocated == second


SELDOM = """
often, seldom = (torch.optim.Adam(part.parameters()) for part in (model[0], model[2]))
for step in range(1000):
    model(batch()).sum().backward()
    often.step()
    if step % 5 == 4:
        seldom.step()
"""
GROUPS = """
used = torch.optim.SGD(model[0].parameters(), 0.1)
frozen = torch.nn.Parameter(torch.randn(8))  # on the host
groups = [[frozen], [model[2].weight], [model[2].bias]]
unused = torch.optim.SGD([{"params": group} for group in groups], 0.1)
for step in range(1000):
    model(batch()).sum().backward()
    used.step()
"""
SHARED = """
used, unused = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
for step in range(1000):
    model(batch()).sum().backward()
    used.step()
"""


@pytest.mark.parametrize(
    ("text", "steps", "noted"),
    [
        pytest.param(SELDOM, 2, True, id="not yet"),
        pytest.param(SELDOM, 7, False, id="later"),
        pytest.param(GROUPS, 2, True, id="once for several groups"),
        pytest.param(SHARED, 2, False, id="its parameters are stepped by another"),
    ],
)
def test_an_optimizer_that_has_not_stepped_is_noted(script, text, steps, noted):
    prediction = predict_program(Script(script(f"model = network(){text}")), steps=steps)
    found = [note for note in prediction.notes if "1 of the script's optimizers did not step" in note]
    assert len(found) == noted
    if steps == 7:
        assert prediction.by_owner["optimizer state"] >= 2 * PARAMETERS


def test_where_the_host_is_followed_a_loader_ends_with_the_last_step(script):
    text = """
from torch.utils.data import DataLoader
model = network()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for values in DataLoader(torch.randn(10**6), batch_size=WIDTH):
    model(values.view(1, -1).to(device)).sum().backward()
    optimizer.step()
"""
    courses = []
    text = text.replace("WIDTH", str(WIDTH))
    prediction = predict_program(Script(script(text)), steps=3, host=courses.append)
    assert len(prediction.steps) == 3 and len(courses) == 1
    assert not any("until the script was left" in note for note in prediction.notes)


def test_backwards_are_steps_without_an_optimizer(script):
    text = """
model = network()
for step in range(10**9):
    model.zero_grad()
    model(batch()).sum().backward()
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)
"""
    found, expected = (predict_program(each, steps=3) for each in (Script(script(text)), build_of(text)))
    for step, other in zip(found.steps, expected.steps, strict=True):
        assert (step.peak_allocated, step.peak_reserved) == (other.peak_allocated, other.peak_reserved)
    assert found.peak_phase == expected.peak_phase
    assert any("each backward counts as a step" in note for note in found.notes)


def test_an_optimizer_is_awaited_however_many_backwards_it_takes(script):
    text = """
model = network()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1000):
    for _ in range(40):
        model(batch()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    prediction = predict_program(Script(script(text)))
    assert len(prediction.steps) == 2
    assert prediction.by_owner["optimizer state"] >= 2 * PARAMETERS


def test_script_that_never_trains_is_one_step(script):
    text = """
model = network().eval()
held = []
with torch.no_grad():
    for number in range(10**9):
        if number < 50:
            held.append(model(batch()))
        else:
            model(batch())
"""
    prediction = predict_program(Script(script(text.replace("10**9", "90"))))
    assert len(prediction.steps) == 1
    assert prediction.peak_phase == "forward"
    assert prediction.peak_allocated > 50 * BATCH * WIDTH * FP32
    assert any("no backward ran" in note for note in prediction.notes)
    ended = predict_program(Script(script(text), inference=True))
    assert ended.peak_allocated == prediction.peak_allocated
    assert any("until 32 calls needed no more memory" in note for note in ended.notes)


def test_a_script_whose_gradients_are_of_its_inputs_is_ended_where_it_never_trains(script):
    text = """
model = network()
source = batch().requires_grad_()
for number in range(COUNT):
    model(source).sum().backward()
    source = (source + source.grad.sign()).detach().requires_grad_()
"""
    whole = predict_program(Script(script(text.replace("COUNT", "6"))))
    ended = predict_program(Script(script(text.replace("COUNT", "10**9")), inference=True))
    assert len(whole.steps) == len(ended.steps) == 2
    assert whole.peak_allocated == ended.peak_allocated


EVALUATED_FIRST = """
def evaluate(model, count):
    with torch.no_grad():
        for number in range(count):
            model(batch())

def backwards(model, count):
    for parameter in model.parameters():
        parameter.data.fill_(0.1)  # not since a backward: no update
    for number in range(count):
        model(batch()).sum().backward()
        model.zero_grad()

model = network()
BEFORE
optimizer = torch.optim.AdamW(model.parameters())
AFTER
for number in range(10**9):
    model(batch().repeat(8, 1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "does", ["evaluate(model, 200)", "backwards(model, 7)", "evaluate(model.eval(), 40)"]
)
def test_what_a_script_does_before_it_makes_an_optimizer_does_not_end_it(script, does):
    first = predict_program(Script(script(EVALUATED_FIRST.replace("BEFORE", does).replace("AFTER", ""))))
    second = predict_program(Script(script(EVALUATED_FIRST.replace("BEFORE", "").replace("AFTER", does))))
    assert first.peak_allocated == second.peak_allocated
    assert first.by_owner["optimizer state"] >= 2 * PARAMETERS
    assert len(first.steps) == 2


def test_a_callback_after_the_last_step_is_not_run(script, capsys):
    text = ONE.replace('print("trained")', "").replace(
        "        for each in optimizers:\n            each.zero_grad()\n",
        "        print('step', step)\n"
        "        with torch.no_grad():\n"
        "            words = [int(each) for each in model(batch())[0].cpu()]\n"
        "        print('wrote', len(words))\n",
    )
    predict_program(Script(script(text), ["1000"]))
    assert capsys.readouterr().out.split("\n") == ["step 0", f"wrote {WIDTH}", "step 1", ""]


def test_a_module_runs_as_python_m_runs_it(tmp_path, monkeypatch):
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "data.py").write_text("SIZE = 128\n")
    (package / "run.py").write_text(
        HEAD
        + "from .data import SIZE\n"
        + "assert sys.argv[0].endswith('run.py') and sys.path[0] != '' and __package__ == 'training'\n"
        + "assert sys.modules['__main__'].SIZE == SIZE\n"
        + ONE
    )
    monkeypatch.chdir(tmp_path)
    prediction = predict_program(Script("training.run", ["1000"], module=True))
    assert prediction.peak_allocated == predict_program(build_with(lambda model: [model])).peak_allocated
    paths = list(sys.path)
    with pytest.raises(BuildError, match="no module named 'nowhere'"):
        Script("nowhere", module=True)
    assert sys.path == paths


_SETTINGS = {"expandable segments", "primed memory"}


def test_a_script_is_planned_with_what_needs_no_change_of_it(script):
    plan = memtriage.plan(Script(script(ONE), ["1000"]), "860MiB")
    assert plan.traces == 1
    assert not plan.fits
    assert any("planned as it is" in note for note in plan.notes)
    passed = {rung.rung: rung for rung in plan.passed_over}
    assert passed["expandable segments"].outcome == "no help"
    assert passed["micro-batch"].outcome == "does not apply"
    assert "build function" in passed["micro-batch"].why
    assert plan.settings_only
    assert {rung.outcome for name, rung in passed.items() if name not in _SETTINGS} == {"does not apply"}
    assert not any("on request" in note for note in plan.notes)
