import json

import pytest

from memtriage.cli import app


def test_json_alone_is_on_stdout(program, capfd):
    assert app.main(["plan", f"{program}:build", "--budget", "1088MiB", "--json", "--show-output"]) == 0
    shown = capfd.readouterr()
    plan = json.loads(shown.out)
    assert plan["schema"] == 1 and plan["fits"] is True
    assert plan["budget"] == 1088 << 20
    assert plan["steps"][0]["rung"] == "micro-batch"
    assert plan["after"]["needs"] <= plan["budget"] < plan["before"]["needs"]
    assert "building" in shown.err  # asked for


def test_the_report_says_what_to_change(program, capsys):
    assert app.main(["plan", f"{program}:build", "--budget", "1088MiB"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("FITS: with 1 change")
    assert "micro-batch" in shown
    assert "TrainingArguments(per_device_train_batch_size=" in shown
    assert "Next cheaper" in shown


def test_the_largest_batch_is_traced_and_so_is_the_next(program, capsys):
    maximize = ["plan", f"{program}:build", "--budget", "1100MiB", "--maximize", "batch"]
    assert app.main([*maximize, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["found"]
    assert row["needs"] <= 1100 << 20 < row["next_needs"]
    assert row["next"] == row["batch"] + 1
    assert app.main(maximize) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"FITS: batch {row['batch']}: needs ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py:build", "--budget", "1GiB"], "no such file"),
        (["{program}:build"], "--budget"),
        (["{program}:build", "--budget", "some"], "'some' is not a size"),
        (["--budget", "1GiB"], "nothing to trace"),
        (["{program}:build", "--budget", "1GiB", "--seq", "8"], "--seq needs --hf-config"),
        (["{program}:build", "--budget", "1GiB", "--hf-config", "config.json"], "use only one of"),
        (["{program}:build", "--budget", "1GiB", "--allow", "anything"], "anything"),
        (["{program}:build", "--budget", "1GiB", "--maximize", "depth"], "expected batch, seq, or batch,seq"),
        (["m.py:build", "--budget", "1GiB", "--maximize", "batch", "--allow", "LoRA"], "use only one of"),
        (["{program}", "--budget", "1GiB", "--maximize", "batch"], "a number, such as --micro-batch 8"),
    ],
)
def test_bad_input_is_one_line_on_stderr(program, arguments, said, refused):
    assert said in refused("plan", *(argument.format(program=program) for argument in arguments))
