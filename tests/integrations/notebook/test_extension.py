"""The extension on a real IPython: the cell stays what it is, and memory is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("IPython")

from IPython.utils.capture import capture_output

from memtriage.process import active
from support.notebooks import run

# --- the cell stays what it is ------------------------------------------------------------------------------


def test_watched_cell_behaves_as_an_ordinary_cell(
    shell: Any, no_census: None, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(
        shell, "%%memtriage --quiet\nimport inspect\nline = inspect.currentframe().f_lineno\nx = 6\nx * 7"
    )
    assert result.success
    assert result.result == 42
    assert shell.user_ns["Out"][result.execution_count] == 42
    assert shell.user_ns["x"] == 6
    assert shell.user_ns["line"] == 3
    assert "Out[3]: 42" in capsys.readouterr().out


def test_a_semicolon_hides_the_value(shell: Any, no_census: None, capsys: pytest.CaptureFixture[str]) -> None:
    run(shell, "%%memtriage -q\n6 * 7;")
    assert "42" not in capsys.readouterr().out


def test_an_error_is_shown_as_ever_and_ends_the_watch(
    shell: Any, no_census: None, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(shell, "%%memtriage\nkept = 1\nraise KeyError('its own')")
    assert isinstance(result.error_in_exec, KeyError)
    assert shell.user_ns["kept"] == 1
    said = capsys.readouterr().out
    assert "KeyError: 'its own'" in said
    assert "----> 3 raise KeyError" in said
    assert "memtriage/integrations" not in said
    assert said.index("KeyError: 'its own'") < said.index("memtriage  C")  # CELL, or CLEAN if it took long
    assert active.session is None


def test_a_cell_may_await(shell: Any, no_census: None) -> None:
    result = run(shell, "%%memtriage -q\nimport asyncio\nawait asyncio.sleep(0)\ndone = 'yes'\ndone")
    assert (result.result, shell.user_ns["done"]) == ("yes", "yes")


@pytest.mark.parametrize("first", ["from __future__ import annotations", "'''words'''", "%time 1", "# words"])
def test_whatever_may_stand_first_still_may(shell: Any, no_census: None, first: str) -> None:
    result = run(shell, f"\n\n%%memtriage -q\n{first}\nafter = 1")
    assert result.success
    assert shell.user_ns["after"] == 1


def test_a_syntax_error_is_the_cells_own(
    shell: Any, no_census: None, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(shell, "%%memtriage\nx = = 1")
    assert isinstance(result.error_before_exec, SyntaxError)
    assert "Cell In[3], line 2" in capsys.readouterr().out
    assert active.session is None


def test_wrong_options_say_so_and_run_nothing(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(shell, "%%memtriage --bogus\nran = 1")
    assert not result.success
    assert "ran" not in shell.user_ns
    assert "UsageError: %%memtriage: " in capsys.readouterr().err


def test_below_another_magic_it_is_refused(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(shell, "%%time\n%%memtriage\nran = 1")
    assert "ran" not in shell.user_ns
    assert "put it into the cell's first line" in capsys.readouterr().err


def test_above_another_magic_it_watches_too(shell: Any, no_census: None) -> None:
    run(shell, "%%memtriage --json told -q\n%%capture words\nprint('inside')")
    assert shell.user_ns["words"].stdout == "inside\n"
    assert shell.user_ns["told"]["verdict"] == "not_judged"


def test_the_record_stays_where_it_is_asked_for(shell: Any, no_census: None, tmp_path: Path) -> None:
    run(shell, f"%%memtriage -q --json told -o {tmp_path}\nmemtriage = __import__('memtriage').mark('here')")
    assert list(tmp_path.glob("*/0/rank-00000.jsonl"))
    assert "here" in {mark["name"] for mark in shell.user_ns["told"]["marks"]}


def test_unloading_ends_the_watch_that_is_on(shell: Any, no_census: None) -> None:
    assert run(shell, "%%memtriage\n%unload_ext memtriage\nx = 1").success
    assert active.session is None
    assert shell.user_ns["x"] == 1


def test_unloading_takes_everything_away(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(shell, "%unload_ext memtriage")
    run(shell, "%%memtriage\nran = 1")
    assert "ran" not in shell.user_ns
    assert shell.find_line_magic("memtriage_free") is None
    run(shell, "%load_ext memtriage")
    assert shell.find_cell_magic("memtriage") is not None


# --- what is shown, and what is in variables ----------------------------------------------------------------


@pytest.mark.parametrize("line", ["%%memtriage {}\nx = 1", "%memtriage {}", "%memtriage_free {}"])
def test_a_result_is_shown_as_text_and_as_a_page(shell: Any, no_census: None, line: str) -> None:
    for option, forms in (("", {"text/plain", "text/html"}), ("--no-html", {"text/plain"})):
        with capture_output() as captured:
            run(shell, line.format(option))
        (output,) = captured.outputs
        assert set(output.data) == forms
        assert "memtriage" in output.data["text/plain"] or "in use" in output.data["text/plain"]
        assert captured.stdout == captured.stderr == ""


def test_a_result_is_in_the_variable_that_is_asked_for(shell: Any, no_census: None) -> None:
    with capture_output():
        run(shell, "%memtriage --json now")
        run(shell, "%memtriage_free --json freed --out")
        run(shell, "%%memtriage --json told\nx = 1")
        run(shell, "%memtriage")
    now, freed, told = (shell.user_ns[name] for name in ("now", "freed", "told"))
    assert (now["schema"], now["holders"], now["outputs"]) == (1, [], {})
    assert "host" in {ledger["device"] for ledger in now["ledgers"]}
    assert freed == {"schema": 1, "freed": {"bytes": {}, "frames": 0, "holders": []}}
    assert (told["verdict"], told["cell"]["label"]) == ("not_judged", "In[5]")
    assert "run_report" not in told["cell"]


@pytest.mark.parametrize(
    ("line", "said"),
    [("%memtriage -h", "--top N"), ("%memtriage_free -h", "--out"), ("%%memtriage -h\nx", "-q")],
)
def test_each_magic_has_its_help(shell: Any, line: str, said: str) -> None:
    with capture_output() as captured:
        run(shell, line)
    assert captured.stdout.startswith(f"usage: {line.split()[0]} [-h]") and said in captured.stdout
    assert captured.outputs == [] and captured.stderr == ""


def test_other_cells_are_left_alone(shell: Any, no_census: None, capsys: pytest.CaptureFixture[str]) -> None:
    for cell in ("y = 1", "y + 1;", "", "raise KeyError"):
        run(shell, cell)
    shell.events.trigger("post_run_cell", None)  # of a cell that began before the extension was loaded
    out, err = capsys.readouterr()
    assert "memtriage" not in out + err and "Error in callback" not in out + err
    assert active.session is None


def test_a_cell_that_is_not_kept_in_the_history_is_watched_too(shell: Any, no_census: None) -> None:
    shell.run_cell("%%memtriage -q --json told\nz = 1", store_history=False)
    assert shell.user_ns["told"]["verdict"] == "not_judged"


def test_loading_twice_is_loading_once(shell: Any, no_census: None) -> None:
    before = list(shell.input_transformer_manager.cleanup_transforms)
    run(shell, "%load_ext memtriage")
    run(shell, "%reload_ext memtriage")
    assert len(shell.input_transformer_manager.cleanup_transforms) == len(before)
    run(shell, "%unload_ext memtriage")
    run(shell, "%unload_ext memtriage")
    assert len(shell.input_transformer_manager.cleanup_transforms) == len(before) - 1
