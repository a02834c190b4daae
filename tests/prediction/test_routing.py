"""What was recorded of a program's routers, and what is said where it cannot be theirs."""

import pytest
import torch

import memtriage
from memtriage.planning.traced_commands import predict
from memtriage.prediction.build import BuildError
from memtriage.prediction.routing import Routing, read_routing
from support.experts import CHOSEN, EXPERTS, mixture


def routing_of(counts):
    routing = Routing("routing.json", counts)

    def chances(state, experts=3, rows=8):
        found = routing.chances(torch.empty(rows, experts), CHOSEN, torch.tensor([state]))
        return None if found is None else found.tolist()

    return routing, chances


TWO = [[4, 3, 3], [1, 2, 2]]
FIRST, SECOND = ([pytest.approx(CHOSEN * n / 10) for n in counts] for counts in ([4, 3, 3], [2, 4, 4]))


def test_a_router_has_the_same_shares_in_each_pass_and_when_it_runs_again():
    routing, chances = routing_of(TWO)
    for number in range(3):
        routing.passes = lambda number=number: number
        assert (chances(2 * number), chances(2 * number + 1)) == (FIRST, SECOND)
        assert (chances(2 * number + 1), chances(2 * number)) == (SECOND, FIRST)  # in backward
    routing.check()
    assert routing.text() == "a router is taken to choose each expert as often as in routing.json"


def test_two_forwards_before_a_backward_have_the_same_routers():
    routing, chances = routing_of(TWO)
    assert [chances(state) for state in range(4)] == [FIRST, SECOND] * 2
    routing.check()
    assert routing.text().endswith("routing.json (4 in a forward pass)")


def test_other_choices_are_no_routers():
    routing, chances = routing_of(TWO)
    assert (chances(0), chances(1, experts=8), chances(1)) == (FIRST, None, SECOND)
    assert chances(2, rows=16) is None  # the loss that balances all routers' experts
    assert (chances(3), chances(4), chances(5, rows=16)) == (FIRST, SECOND, None)
    routing.check()
    assert "other choices by torch.topk are among 3, 8, each equally often" in routing.text()


def test_one_list_is_for_all_routers():
    routing, chances = routing_of([[1, 1, 2]])
    assert [chances(state) for state in range(3)] == [[0.5, 0.5, 1]] * 3
    routing.check()


@pytest.mark.parametrize(
    ("counts", "routers", "said"),
    [
        ([[1, 2, 3, 4]], 1, "router 1 of 1 has 4 experts, .* other choices by torch.topk are among 3;"),
        ([[1, 2, 3], [1, 2]], 2, "router 2 of 2 has 2 experts, .* are among 3;"),
        ([[1, 2, 3], [1, 2, 3]], 1, "router 2 of 2 .* there is no other choice by torch.topk;"),
        ([[1, 2, 3], [1, 2, 3]], 3, "it has 2 routers, but the program has 3;"),
    ],
)
def test_a_program_with_other_routers_is_refused(counts, routers, said):
    routing, chances = routing_of(counts)
    for state in range(routers):
        chances(state)
    with pytest.raises(BuildError, match=f"^--routing routing.json: {said} give one list per router"):
        routing.check()


def test_shares_that_no_router_can_have_are_refused():
    _, chances = routing_of([[1, 2, 4]])
    with pytest.raises(BuildError, match=r"chooses 2 experts .* more than 50.00% .* one has 57.14%; count"):
        chances(0)


@pytest.mark.parametrize(
    ("text", "counts"), [("[[1, 3], [0.5, 0]]", [[0.25, 0.75], [1, 0]]), ("[1, 3]", [[0.25, 0.75]])]
)
def test_a_file_has_a_list_per_router_or_one_for_all(tmp_path, text, counts):
    file = tmp_path / "routing.json"
    file.write_text(text)
    routing = read_routing(file)
    for number, shares in enumerate(counts):
        assert routing.chances(torch.empty(1, 2), 1, torch.tensor([number])).tolist() == shares
    routing.check()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("[0.5", "JSON"),
        ("{}", "Expected `array`"),
        ("3", "Expected `array`"),
        ("[]", "router 1 sends no token"),
        ("[[1, 2], [0, 0]]", "router 2 sends no token"),
        ("[[1, -2]]", ">= 0.0"),
        ("[1, [2]]", "Expected `array`"),
        ('["1"]', "Expected `float`"),
    ],
)
def test_another_file_is_one_clear_line(tmp_path, text, said):
    file = tmp_path / "routing.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError) as raised:
        read_routing(file)
    line = str(raised.value)
    assert line.startswith(f"--routing {file}: ") and said in line and "\n" not in line
    assert "expected JSON: for each router, in the order in which they run" in line


def test_a_horizon_reads_the_file(tmp_path):
    program, file = tmp_path / "small.py", tmp_path / "routing.json"
    program.write_text("from support.experts import mixture\n\nbuild = mixture()\n")
    options = {"steps": 2, "horizon": 20, "routing": str(file)}
    file.write_text(f"[{', '.join(['1'] * EXPERTS)}]")
    found = predict({"name": f"{program}:build"}, dict(options)).prediction
    assert any(f"as often as in {file}" in note for note in found.notes)
    again = memtriage.horizon(mixture(), steps=20, routing=file)
    assert again.allocated_p999 == found.horizon.allocated_p999
    file.write_text(f"[{', '.join(['1'] * 9)}]")
    with pytest.raises(ValueError, match=f"has 9 experts, .* are among {EXPERTS};"):
        predict({"name": f"{program}:build"}, dict(options))
    with pytest.raises(ValueError, match=f"has 9 experts, .* are among {EXPERTS};"):
        memtriage.horizon(mixture(), steps=20, routing=file)
