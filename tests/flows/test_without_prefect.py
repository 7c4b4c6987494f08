"""Commands for one step without a server, what they import and when, and what every command says at its end."""

import json
import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flows.cli.environment import _names_server, _point_to_the_end, report_errors, stopped_message
from flows.cli.inspection import config_fields, show_fields
from flows.cli.main import app
from flows.cli.show import out
from flows.model_names import could_be_registered, is_registered_name
from flows.preflight import check_columns
from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, DataError

HEAVY = {"prefect", "mlflow", "torch", "transformers"}
WATCHED = """
import sys
from flows.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    code = end.code
print("IMPORTED", sorted({name.partition(".")[0] for name in sys.modules} & %r), "EXIT", code)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    return tmp_path


def watched(*arguments):
    """Run a command in a process of its own; its output, and which heavy libraries it had imported at its end."""
    command = [sys.executable, "-c", WATCHED % HEAVY, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    found = re.search(r"IMPORTED (\[.*\]) EXIT (\d+)", done.stdout)
    assert found, done.stdout + done.stderr
    return done.stdout + done.stderr, set(json.loads(found[1].replace("'", '"'))), int(found[2])


def write_config(folder, **data):
    (folder / "rows.jsonl").write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": n + 1}) + "\n" for n in range(40)))
    train = data.pop("train", "rows.jsonl")
    tree = {"name": "mine", "data": {"train": [{"path": train}], **data}, "stages": [{"name": "a", "rewards": ["format"]}]}
    (folder / "mine.yaml").write_text(json.dumps(tree))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_validate_needs_no_prefect_and_its_second_call_skips_both_steps(here):
    write_config(here)
    output, imported, code = watched("validate", "mine.yaml")
    assert code == 0, output
    assert "prefect" not in imported
    assert "torch" not in imported
    assert "40 rows read" in output
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{here / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.tags["grpo.data_digest"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "data", "says"),
    [
        ("run", {"train": "rowz.jsonl"}, "no such file"),
        ("validate", {"question_column": "Question"}, "no row has a column Question"),
        ("rewards", {"question_column": "Question"}, "no row has a column Question"),
    ],
)
def test_a_missing_file_or_column_is_refused_before_anything_heavy_is_imported(here, command, data, says):
    write_config(here, **data)
    output, imported, code = watched(command, "mine.yaml")
    assert says in output
    assert output.count("fix:") == 1
    assert code != 0
    assert imported == set()


def test_a_command_looks_for_garbage_less_often_than_python_does_by_default(here, monkeypatch):
    set_to = []
    monkeypatch.setattr("flows.cli.main.gc.set_threshold", lambda *thresholds: set_to.append(thresholds))
    CliRunner().invoke(app, ["presets"])
    [(objects, *_)] = set_to
    assert objects > 100 * 700


def test_only_the_first_rows_are_read_for_it(here):
    write_config(here)
    rows = [{"question": f"{n}?", "answer": n} for n in range(300)] + [{"other": 1}]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    check_columns(load_config("mine.yaml"))
    (here / "rows.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(DataError, match="no row has a column"):
        check_columns(load_config("mine.yaml"))


def test_the_first_line_comes_before_the_slow_imports(here, monkeypatch):
    from flows.cli import run as commands

    write_config(here)
    seen = []
    monkeypatch.setattr(commands.typer, "echo", lambda text, **_: seen.append(text))

    def stop(*_, **__):
        seen.append("imports")
        raise ConfigError("stopped here")

    monkeypatch.setattr(commands, "prepare_step", stop)
    monkeypatch.setattr(commands, "prepare_flow", stop)
    for command in ("validate", "rewards", "run"):
        seen.clear()
        CliRunner().invoke(app, [command, "mine.yaml"])
        assert seen[0].startswith("mine: "), command
        assert seen[1] == "imports"


def test_a_server_from_environment_profile_or_settings_file_is_found(here, monkeypatch):
    assert not _names_server()
    monkeypatch.setattr("flows.temporary_server.is_temporary", lambda: False)
    assert not _names_server(), "Prefect is not asked where nothing names a server"
    (here / "prefect.toml").write_text('[api]\nurl = "http://127.0.0.1:1/api"\n')
    assert _names_server()
    (here / "prefect.toml").unlink()
    # Importing Prefect makes it.
    (here / "prefect").mkdir(exist_ok=True)
    (here / "prefect" / "profiles.toml").write_text('[profiles.mine]\nPREFECT_API_URL = "http://127.0.0.1:1/api"\n')
    assert _names_server()
    (here / "prefect" / "profiles.toml").unlink()
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    assert _names_server()


def test_ctrl_c_says_from_where_the_same_command_continues(here, capsys):
    with pytest.raises(SystemExit) as end, report_errors():
        raise KeyboardInterrupt
    assert end.value.code == 130
    assert capsys.readouterr().err.strip() == "stopped"
    stage = here / "runs" / "mine" / "train_stage" / "format-0123"
    stage.mkdir(parents=True)
    assert stopped_message(here / "runs" / "mine") == (
        "stopped; the same command starts stage format again, because it had no checkpoint yet"
    )
    for step in (20, 40):
        (stage / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    (stage / "checkpoints" / "step-000060.part").mkdir()
    assert stopped_message(here / "runs" / "mine") == "stopped; the same command continues from update 41 of stage format"
    (stage / "result.json").touch()
    assert "first step that is not finished" in stopped_message(here / "runs" / "mine")


def test_an_error_that_prefect_logs_points_to_the_message_at_the_end():
    import logging

    error = DataError("rows are bad", fix="correct them")
    record = logging.LogRecord("prefect.task_runs", logging.ERROR, "", 0, "failed: %r", (error,), (DataError, error, None))
    assert _point_to_the_end(record)
    assert "rows are bad" not in record.getMessage()
    state = logging.LogRecord("prefect.flow_runs", logging.ERROR, "", 0, "Finished in state Failed('rows are bad')", (), None)
    assert _point_to_the_end(state)
    assert state.getMessage() == "Finished in state Failed"
    ours = logging.LogRecord("prefect.flow_runs", logging.ERROR, "", 0, "failed", (), (KeyError, KeyError("x"), None))
    _point_to_the_end(ours)
    assert ours.exc_info is not None, "a fault of this program keeps its traceback"


def test_fields_have_their_brackets_and_whole_names_in_eighty_columns(capsys, monkeypatch):
    monkeypatch.setattr(out, "width", 80)
    show_fields()
    shown = capsys.readouterr().out
    for name, _ in config_fields(RunConfig):
        assert re.search(rf"^{re.escape(name)}( = |$)", shown, re.M), name
    assert "stages[].learning_rate = 1e-06" in shown
    assert max(len(line) for line in shown.splitlines() if line.startswith("    ")) <= 80
    show_fields("learning_rate")
    few = capsys.readouterr().out
    assert "stages[].learning_rate" in few
    assert "model.path" not in few
    with pytest.raises(ConfigError, match="xyzzy"):
        show_fields("xyzzy")


def test_run_without_a_config_suggests_those_of_the_folder(here):
    write_config(here)
    (here / "compose.yaml").write_text("services: {}\n")
    (here / "mine.yaml").write_text("extends: demo\n")
    alone = CliRunner().invoke(app, ["run"])
    assert alone.exit_code == 2
    assert "configs here: mine.yaml" in alone.output
    assert "compose" not in alone.output
    assert "did you mean mine.yaml" in CliRunner().invoke(app, ["run", "mien.yaml"]).output
    assert "mine.yaml" in CliRunner().invoke(app, ["run", "something"]).output


@pytest.mark.parametrize(
    ("name", "registered", "asked"),
    [
        ("mine@champion", True, True),
        ("mine/3", True, True),
        ("models:/mine/3", True, True),
        ("mine", False, True),
        ("Qwen/Qwen2.5-0.5B", False, False),
        ("embedded:base", False, False),
        ("./folder", False, False),
    ],
)
def test_the_form_of_a_name_says_whether_the_registry_is_asked(here, name, registered, asked):
    assert (is_registered_name(name), could_be_registered(name)) == (registered, asked)
    (here / "mine").mkdir()
    assert not could_be_registered("mine"), "a folder of that name wins"
