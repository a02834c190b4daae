"""The plugin in a real pytest run: what fails, what it says, and what passes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import pytest

TESTS = """
    import pytest
    import torch

    KEPT = []

    def train(steps, keep):
        model = torch.nn.Linear(256, 256)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            loss = model(torch.randn(64, 256)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if keep:
                KEPT.append(torch.zeros(65536))

    @pytest.mark.memory(no_growth=True)
    def test_leaks():
        train(30, keep=True)

    @pytest.mark.memory(no_growth=True)
    def test_is_flat():
        train(30, keep=False)

    @pytest.mark.memory(max_peak="64MiB")
    class TestPeak:
        def test_is_high(self):
            assert torch.ones(32 << 20).sum()

        @pytest.mark.memory(max_peak="1GiB")
        def test_may_be_high(self):
            assert torch.ones(32 << 20).sum()

    @pytest.mark.memory(no_growth=True, max_peak="1KiB")
    def test_is_wrong():
        kept = torch.ones(32 << 20)
        assert kept.sum() == 3, "its own words"

    def test_without_a_marker():
        train(2, keep=True)

    def test_fixture_leaks(memory):
        with memory.check(no_growth=True):
            memory.repeat(lambda: KEPT.append(torch.zeros(65536)))

    @pytest.mark.memory(no_residue=True)
    def test_leaves_something():
        KEPT.append(torch.zeros(1 << 20))

    @pytest.mark.memory(no_residue=True)
    def test_leaves_nothing():
        train(2, keep=False)

    @pytest.mark.memory(no_grwth=True)
    def test_mistyped(): pass

    @pytest.mark.memory("2GiB")
    def test_no_keyword(): pass
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """By test the text that it failed with; None where it passed. The run is spread over two processes."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "test_memory.py").write_text(textwrap.dedent(TESTS))
    options = ["-p", "no:cacheprovider", "--strict-markers"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-n", "2", "--junit-xml", "result.xml", "test_memory.py"],
        cwd=folder, capture_output=True, timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    found: dict[str, str | None] = {}
    for case in ElementTree.parse(Path(folder, "result.xml")).iter("testcase"):
        failed = case.find("failure")
        found[case.attrib["name"]] = None if failed is None else failed.text
    return found


def test_what_meets_its_demands_passes(outcomes: dict[str, str | None]) -> None:
    passed = {name for name, said in outcomes.items() if said is None}
    assert passed == {"test_is_flat", "test_may_be_high", "test_without_a_marker", "test_leaves_nothing"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("test_leaks", ["memory grows, and the test demands that nothing does", "KEPT[*]", "256.5 KiB"]),
        ("test_fixture_leaks", ["memory grows", "KEPT[*]", "256.5 KiB"]),
        ("test_is_high", ["memory: the peak on the process is 1", "at most 64.0 MiB (67,108,864 bytes)"]),
        ("test_leaves_something", ["memory stays", "4.0 MiB", "KEPT[*]"]),
        ("test_mistyped", ["unknown 'no_grwth': did you mean no_growth?"]),
        ("test_no_keyword", ["keywords only"]),
    ],
)
def test_what_does_not_says_why(outcomes: dict[str, str | None], name: str, said: list[str]) -> None:
    text = outcomes[name]
    assert text is not None
    for part in said:
        assert part in text


def test_what_fails_by_itself_fails_as_it_would_without(outcomes: dict[str, str | None]) -> None:
    text = outcomes["test_is_wrong"]
    assert text is not None
    assert "its own words" in text
    assert "memory: " not in text


BUILDS = """
    import pytest
    import torch

    SIZE = 1 << 20

    def built(device):
        model = torch.nn.LayerNorm(4, device=device)  # no workspace
        optimizer = torch.optim.SGD(model.parameters())

        def step():
            kept = torch.empty(64 * SIZE, dtype=torch.uint8, device=device)
            model(torch.ones(1, 4, device=device)).sum().backward()
            optimizer.step()

        return model, optimizer, step

    @pytest.mark.memory(peak="65MiB", tolerance=0.01)
    def test_fits(device):
        return built(device)

    @pytest.mark.memory(peak="60MiB")
    def test_is_high(cuda):
        return built(cuda)

    @pytest.mark.memory(peak="60MiB", tolerance=0.1)
    def test_is_tolerated(device):
        return built(device)

    @pytest.mark.memory(peak="1GiB", tolerence=0.1)
    def test_is_mistyped(device):
        return built(device)

    @pytest.mark.memory(peak="1GiB")
    def test_builds_nothing(device):
        return None
"""


def test_a_build_function_is_predicted_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "test_builds.py").write_text(textwrap.dedent(BUILDS))
    report = tmp_path / "junit.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"],
        cwd=tmp_path,
        capture_output=True,
        timeout=300,
    )
    said = {}
    for case in ElementTree.fromstring(report.read_text()).iter("testcase"):
        failure = case.find("failure")
        said[case.attrib["name"].partition("[")[0]] = None if failure is None else failure.attrib["message"]
    assert said.pop("test_fits") is None
    assert said.pop("test_is_tolerated") is None
    high = said.pop("test_is_high")
    assert high is not None
    assert "the test demands at most 60.0 MiB" in high
    assert "64.0 MiB  activation  test_builds.py:12 in step" in high
    expected = {
        "test_is_mistyped": "did you mean tolerance?",
        "test_builds_nothing": "could not be predicted",
    }
    assert said.keys() == expected.keys()
    for name, text in expected.items():
        assert text in (said[name] or "")
