"""What a trials file says, and one clear line for each way in which it can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtriage.prove.table import TrialsError
from memtriage.prove.trials import read_trials
from support.trials import HEAD, parsed, trials_of


def test_defaults(tmp_path: Path) -> None:
    trials = parsed('[trials]\nmodule = "job"\n[[variant]]\nname = "a"', tmp_path)
    assert (trials.ranks, trials.repeats, trials.warmup, trials.timeout_s) == (1, 5, 4, None)
    assert (trials.mark, trials.step, trials.baseline, trials.name) == ("step", "step", "a", "trials")
    assert (trials.script, trials.module, trials.directory) == (None, "job", tmp_path.resolve())
    assert trials.variants[0].allocator is None
    assert (trials.variants[0].phase, trials.variants[0].host_tuning) == (None, False)


def test_a_variant_adds_to_what_is_common(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    trials = parsed(
        """
        [trials]
        script = "train.py"
        args = ["--steps", 12]
        env = { A = "1", B = "common" }
        allocator = { expandable_segments = true, max_split_size_mb = 128 }
        timeout = "1.5 min"
        memtriage = { host_tuning = true }
        step = "iteration"
        baseline = "b"
        [[variant]]
        name = "a"
        [[variant]]
        name = "b"
        args = ["--fp8"]
        env = { B = false, C = 2 }
        allocator = ""
        memtriage = { phase = false }
        """,
        tmp_path,
    )
    first, second = trials.variants
    assert first.args == ("--steps", "12")
    assert first.allocator == "expandable_segments:True,max_split_size_mb:128"
    assert (first.phase, first.host_tuning) == (None, True)
    assert second.args == ("--steps", "12", "--fp8")
    assert second.env == {"A": "1", "B": None, "C": "2"}
    assert second.allocator == ""
    assert (second.phase, second.host_tuning) == (False, True)
    assert trials.script == tmp_path / "train.py"
    assert (trials.timeout_s, trials.mark, trials.baseline) == (90.0, "iteration", "b")


def test_target_without_variant_is_for_all_its_limit_omits(tmp_path: Path) -> None:
    target = '[[target]]\nmetric = "time_per_step"\nat_most = "1.01 x a"\n'
    trials = trials_of(tmp_path, "a", "b", "c", more=target)
    assert [target.variant for target in trials.targets] == ["b", "c"]
    target = '[[target]]\nmetric = "reserved"\nvariant = ["c", "a"]\nat_most = "2 GiB"\n'
    assert [judged.variant for judged in trials_of(tmp_path, "a", "b", "c", more=target).targets] == [
        "c",
        "a",
    ]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('warmpu = 3\n[[variant]]\nname = "a"', "unknown key 'warmpu' in .trials.; .*did you mean 'warmup'"),
        ("", "no .*variant.*; expected at least one"),
        ('[[variant]]\nname = "a"\n[[variant]]\nname = "a"', "a name that no other variant has"),
        ('[[variant]]\nargs = ["x"]', "name = None"),
        ('[[variant]]\nname = "it\'s"', "without"),
        ('[[variant]]\nname = "reserved"', "named as a metric"),
        ('timeout = "soon"\n[[variant]]\nname = "a"', "timeout = 'soon' .*a time span"),
        ('env = { A = true }\n[[variant]]\nname = "a"', "for 'A' a text, a number, or false"),
        ('baseline = "z"\n[[variant]]\nname = "a"', "baseline = 'z' .*'a'"),
        ('script = "gone.py"\n[[variant]]\nname = "a"', "names both script and module"),
        ('directory = "gone"\n[[variant]]\nname = "a"', "a directory that exists"),
        ('[[variant]]\nname = "a"\n[values]\nloss = "loss"', "one group"),
        ('[[variant]]\nname = "a"\n[values]\nloss = "loss (["', "a regular expression"),
        ('[[variant]]\nname = "a"\n[values]\nreserved = "(.)"', "cannot name a value"),
        ('[[variant]]\nname = "a"\n[[target]]\nmetric = "speed"\nat_most = 1', "metric = 'speed' .*reserved"),
        ('[[variant]]\nname = "a"\n[[target]]\nmetric = "reserved"', "has no limit"),
        ('[[variant]]\nname = "a"\n[[target]]\nmetric = "reserved"\nequals = "a"', "for figures read by"),
        (
            '[[variant]]\nname = "a"\n[[target]]\nmetric = "reserved"\nat_most = "1 MB"\nvariant = "b"',
            "names of variants .*'a'",
        ),
        (
            '[[variant]]\nname = "a"\n[[target]]\nmetric = "reserved"\nat_most = "2 x b"',
            "at_most in .*target.* 1: .*neither a variant",
        ),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_do(tmp_path: Path, more: str, said: str) -> None:
    with pytest.raises(TrialsError, match=said) as caught:
        parsed(HEAD + more, tmp_path)
    assert "\n" not in str(caught.value)
    assert "expected" in str(caught.value)


def test_script_or_module(tmp_path: Path) -> None:
    with pytest.raises(TrialsError, match="neither script and module"):
        parsed('[trials]\n[[variant]]\nname = "a"', tmp_path)
    with pytest.raises(TrialsError, match=r"script = 'gone.py' .*a Python file"):
        parsed('[trials]\nscript = "gone.py"\n[[variant]]\nname = "a"', tmp_path)
    with pytest.raises(TrialsError, match=r"no table \[trials\]"):
        parsed('[[variant]]\nname = "a"', tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrialsError, match=r"gone\.toml: No such file"):
        read_trials(tmp_path / "gone.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[trials\n")
    with pytest.raises(TrialsError, match=r"bad\.toml: invalid TOML"):
        read_trials(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(TrialsError, match=r"bad\.toml: invalid TOML"):
        read_trials(bad)
    bad.write_text("[trials]\nmodule = 'a'\n")
    with pytest.raises(TrialsError, match=r"bad\.toml: there is no"):
        read_trials(bad)


EQUALS = """
    [trials]
    module = "job"
    [[variant]]
    name = "a"
    [[variant]]
    name = "b"
    [values]
    loss = "loss (.*)"
    [[target]]
    metric = "loss"
    equals = "%s"
"""


def test_equals_is_for_all_other_variants_and_names_one_that_there_is(tmp_path: Path) -> None:
    (target,) = parsed(EQUALS % "a", tmp_path).targets
    assert (target.metric, target.variant, target.sense, target.equals) == ("loss", "b", "equals", "a")
    with pytest.raises(TrialsError, match=r"equals = 'c' .*the name of a variant"):
        parsed(EQUALS % "c", tmp_path)
