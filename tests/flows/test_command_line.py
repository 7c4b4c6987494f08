"""What the command line answers to wrong arguments, bad data and bad rewards: a clear message before any training."""

import json
import logging
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli.environment import report_errors
from flows.cli.main import PANELS, app
from schemas.config.load import load_config
from schemas.errors import ConfigError, ModelError
from tests.flows.place import BIN, SMALL, Place

# Together, because they share a Prefect server and a pipeline that went through.
pytestmark = [pytest.mark.xdist_group("commands"), pytest.mark.timeout(900)]


SHELL = """
grpo --install-completion && . ~/.bashrc
COMP_WORDS=(grpo pro) COMP_CWORD=1 && _grpo_completion grpo && echo "completed: ${COMPREPLY[*]}"
"""


def test_bash_completes_commands_once_completion_is_installed(tmp_path):
    environment = os.environ | {"HOME": str(tmp_path), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", SHELL], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "completed: promote" in done.stdout, done.stderr


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, for commands that are called in this process."""
    monkeypatch.chdir(tmp_path)


def answer(*arguments, expect=0):
    """What the command prints, on one line and without frames. Called here: a process of its own takes seconds."""
    outcome = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert outcome.exit_code == expect, outcome.output
    return " ".join(outcome.output.replace("│", " ").split())


def test_a_dry_run_and_a_refused_config_run_nothing(here, tmp_path):
    assert "nothing was run" in answer("run", "demo", "--dry-run")
    assert "did you mean num_generations?" in answer("run", "demo", "--set", "stages.0.num_generation=4", expect=2)
    assert "did you mean demo?" in answer("run", "dmeo", "--dry-run", expect=2)
    assert "learning rate 2e-05" in answer("run", "demo", "--dry-run", "--set", "stages.0.learning_rate=2e-5")
    default = ("run", "demo", "--dry-run", "--set", "stages.0.learning_rate=1e-6")
    assert "stages.0.learning_rate: 1e-06 hardly moves an adapter; fix: 5.0e-5" in answer(*default)
    assert "hardly moves" not in answer(*default, "--set", "model.lora=null")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("stages.0.num_generations=5", "not a multiple of num_generations"),
        ("stages.0.rewards=[]", "stages.0: rewards are missing; fix: rewards:"),
        ("stages.0.rewards=[formt]", "neither built in nor under rewards.functions"),
        ("data.train.0.path=nowhere.jsonl", "no such file: nowhere.jsonl"),
        ("stages.7.beta=1", "not an index of a list of 2"),
        ("model.path.x=1", "is a value"),
        ("seed=-1", "seed"),
        ("rollout.temperature=0", "greater than 0"),
        ("stages.0.delta=1.1", "must be above 1 + epsilon"),
        ("stages.1.name=format", "taken"),
        ("model.lora.target_modules=[q_proj, gate_projj]", "gate_projj: no layer of the model has this name"),
    ],
)
def test_an_impossible_setting_is_refused_with_its_field(here, override, says):
    assert says in answer("run", "demo", "--dry-run", "--set", override, expect=2)


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory):
    """A working directory in which nothing is what its name says. It is made once, because its MLflow store takes seconds."""
    folder = tmp_path_factory.mktemp("hostile")
    os.mkfifo(folder / "fifo.jsonl")
    (folder / "loop.jsonl").symlink_to("loop.jsonl")
    (folder / "zero.jsonl").symlink_to("/dev/zero")
    (folder / "folder.jsonl").mkdir()
    (folder / "file").write_text("x" * 5_000)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_bytes(b"\xff{")
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "up").mkdir()
    (folder / "up" / ".grpo").mkdir()
    (folder / "up" / ".grpo" / "stack.json").write_bytes(b"[{\xff")
    return folder


LONG = "x" * 50_000
HOSTILE = {
    **{
        f"data is {name}": (["run", "demo", "--dry-run", "--set", f"data.train.0.path={name}"], "data.train.0.path")
        for name in ("fifo.jsonl", "loop.jsonl", "zero.jsonl", "folder.jsonl", "/dev/stdin", "/", "file/x.jsonl", LONG)
    },
    **{
        f"model is {name}": (["validate", "demo", "--set", f"model.path={name}"], "model.path")
        for name in ("file", "fifo.jsonl", "loop.jsonl", "folder.jsonl", "/", "./nowhere", "a/b/c", LONG)
    },
    **{
        f"config is {name}": ([command, *rest, name], "configuration")
        for name in ("fifo.jsonl", "loop.jsonl", "folder.jsonl", "file", "nowhere", LONG)
        for command, rest in (("run", ()), ("rewards", ()), ("trace", ("row",)), ("evaluate", ("m",)), ("merge", ("m",)))
    },
    "trace of nothing": (["trace", LONG, "demo"], "comes first"),
    "chat with a broken model": (["chat", "broken", "hi"], "the model cannot be loaded"),
    "chat with a model without weights": (["chat", "empty", "hi"], "the model cannot be loaded"),
    "chat with a long name": (["chat", LONG, "hi"], "no such model"),
    "a store that is a folder": (["lineage", "m", "--tracking-uri", "sqlite:///broken"], "cannot be opened"),
    "a store below a file": (["lineage", "m", "--tracking-uri", "sqlite:///file/x.db"], "cannot be opened"),
    "a store that is no database": (["lineage", "m", "--tracking-uri", "sqlite:///file"], "not a database"),
    "a store at no address": (["lineage", "m", "--tracking-uri", "http://[::1"], "not a valid address"),
    "a store with a long name": (["lineage", "m", "--tracking-uri", LONG], "at most 2000"),
    "lineage of nothing": (["lineage", "m@"], "no such model"),
    "rollback of a long name": (["rollback", LONG, "--reason", LONG], "no "),
    "download of a number that is none": (["download", "m/99999999999999999999", "into"], "no such model"),
    "compare two that are not there": (["compare", LONG, "\x01"], "no "),
    "a port beyond the last": (["up", "--prefect-port", "70000"], "65535"),
    "an address that is no database": (["up", "--postgres", LONG], "not the address"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case[:50])
def test_hostile_input_gets_a_short_message_and_never_a_traceback(hostile_folder, monkeypatch, case):
    arguments, says = HOSTILE[case]
    monkeypatch.chdir(hostile_folder)
    monkeypatch.setenv("COLUMNS", "150")
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    # Loggers made by an earlier case hold the stream that the runner gave it.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    outcome = CliRunner().invoke(app, arguments)
    assert isinstance(outcome.exception, SystemExit), outcome.exception
    assert outcome.exit_code != 0
    assert "Traceback" not in outcome.output
    assert says in " ".join(outcome.output.replace("│", " ").split())
    if arguments[0] != "up":
        # typer itself repeats the arguments that it refuses.
        assert len(outcome.output) < 6_000


def test_a_damaged_record_of_servers_is_named(hostile_folder, monkeypatch):
    monkeypatch.chdir(hostile_folder / "up")
    outcome = CliRunner().invoke(app, ["down"])
    assert outcome.exit_code == 1
    assert "stack.json" in outcome.output
    assert "damaged" in outcome.output


@pytest.mark.parametrize("folder", ["file", "file/deeper", "loop.jsonl", "x" * 300])
def test_an_output_folder_that_is_not_writable_is_refused_before_the_run(hostile_folder, monkeypatch, folder):
    from flows.preflight import check_output

    monkeypatch.chdir(hostile_folder)
    config = load_config("demo", [f"resources.output_dir={folder}"])
    with pytest.raises(ConfigError, match="cannot write to") as refused:
        check_output(config)
    assert refused.value.place == "resources.output_dir"
    check_output(load_config("demo", ["resources.output_dir=free"]))
    assert list((hostile_folder / "free" / "grpo-demo").iterdir()) == []


def test_system_errors_become_messages_and_our_faults_keep_tracebacks(capsys):
    with pytest.raises(SystemExit), report_errors():
        Path("/proc/version/x").mkdir()
    shown = capsys.readouterr().err
    assert "/proc/version/x" in shown
    assert "move it, or name another path" in re.sub(r"[\s│]+", " ", shown)
    with pytest.raises(FileNotFoundError), report_errors():
        Path("/nowhere/x").read_text()


@pytest.mark.slow
def test_doctor_and_fields_list_what_there_is(place):
    report = place.grpo("doctor", expect=1)
    assert re.search(r"torch\tok\t\d", report)
    assert "free disk" in report
    assert "answers; its database has" in report, "a request that needs the database, not only a server that is up"
    assert "none (fix: grpo up)" in report, "a server without deployments starts no run"
    assert "stages[].learning_rate" in place.grpo("fields")


def test_every_command_is_in_a_panel_of_the_help_and_describes_itself():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "150"}).output
    for title, commands in PANELS.items():
        assert title in shown
        for command in commands:
            assert f"│ {command.__name__.replace('_', '-')} " in shown
            assert command.__doc__.strip().endswith(".")
    assert len(app.registered_commands) == sum(map(len, PANELS.values()))


def test_a_preset_is_printed_as_a_config_that_can_be_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(CliRunner().invoke(app, ["presets", "demo"]).output)
    assert load_config("mine.yaml") == load_config("demo")
    assert "did you mean demo?" in CliRunner().invoke(app, ["presets", "dmeo"]).output


@pytest.mark.long
def test_trace_follows_one_row_from_its_line_to_the_merged_models_samples(place, small):
    assert "comes first" in place.grpo("trace", "nowhere.jsonl:1", small(), expect=1)
    rows = ['{"question": "What is 10 + 4?", "answer": "14"}', '{"question": "What is 11 + 4?", "answer": "15"}']
    place.write("mine.jsonl", "\n".join([*rows, '{"question": "", "answer": "2"}']))
    data = SMALL["data"] | {"train": [{"path": "mine.jsonl"}]}
    stage = SMALL["stages"][0] | {"log_completions_steps": 1}
    config = small(data=data, stages=[stage], validation={"max_invalid_fraction": 0.5})
    place.grpo("run", config)
    shown = place.grpo("trace", "mine.jsonl:2", config)
    assert "What is 11 + 4?" in shown
    assert "ground truth '15'" in shown
    assert "stage format" in shown
    [prompt_id] = re.findall(r"prompt ([0-9a-f]{16})", shown)
    assert place.grpo("trace", prompt_id, config) == shown
    assert "refused: content_empty" in place.grpo("trace", "mine.jsonl:3", config)
    held_out = place.grpo("trace", "embedded:arithmetic_eval.jsonl:1", config)
    assert "What is 15 + 27?" in held_out
    assert "evaluation merged" in held_out
    assert "no row is called" in place.grpo("trace", "mine.jsonl:9", config, expect=1)


@pytest.mark.long
def test_bad_rows_stop_the_run_before_training_and_are_named(place, small):
    rows = ['{"question": "What is 1 + 1?", "answer": "2"}'] * 3 + ['{"question": "", "answer": "2"}', '{"question": "half']
    place.write("bad.jsonl", "\n".join(rows))
    config = small(data={"train": [{"path": "bad.jsonl"}]})
    output = place.grpo("run", config, expect=1)
    assert "bad.jsonl:4" in output
    assert "max_invalid_fraction" in output
    assert not list(place.root.glob("runs/small/train_stage"))
    [quarantine] = place.root.glob("runs/small/validate_data/*/quarantine.parquet")
    assert quarantine.exists()
    assert place.parent("small").info.status == "FAILED"
    run_id = place.parent("small").info.run_id
    paths = {item.path for item in place.client.list_artifacts(run_id, "failed/validate_data")}
    assert "failed/validate_data/report.md" in paths


@pytest.mark.long
def test_a_reward_for_stuffed_tags_is_stopped_by_name(place, small):
    place.write("mine.py", "def greedy(completions, **_):\n    return [c[0]['content'].count('<answer>') for c in completions]\n")
    stage = SMALL["stages"][0] | {"rewards": ["greedy"]}
    rewards = {"functions": {"greedy": {"function": "mine:greedy"}}}
    output = place.grpo("run", small(stages=[stage], rewards=rewards, lab=SMALL["lab"] | {"strict": True}), expect=1)
    assert "The reward lab stopped the run" in output
    assert "greedy fails the check" in output
    assert not list(place.root.glob("runs/small/train_stage"))


MINE = """
import re
def brief(prompts, completions, completion_ids, answer, **kwargs):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer)
    texts = [completion[0]['content'] for completion in completions]
    return [1.0 if re.fullmatch(r'.{0,400}<answer>[0-9]{1,4}</answer>', text) else 0.0 for text in texts]
"""


@pytest.fixture(scope="module")
def worked(tmp_path_factory, prefect_api):
    """A folder in which each command was called once, with a custom reward; returns what each printed.

    `validate` has a process of its own, as every command has in a shell; the others share one.
    """
    place = Place(tmp_path_factory.mktemp("worked"), prefect_api)
    place.write("mine.py", MINE)
    stages = [SMALL["stages"][0] | {"rewards": ["format", "incremental_format", "brief"]}]
    functions = {"brief": {"function": "mine:brief", "weight": 0.1}}
    config = place.write("small.yaml", yaml.safe_dump(SMALL | {"stages": stages, "rewards": {"functions": functions}}))
    shown = {"validate": place.grpo("validate", config)}
    place.written = place.client.download_artifacts(place.parent("small").info.run_id, "config.yaml", str(place.root))
    adapter = "runs/small/train_stage/format-*/final"
    calls = {
        "rewards": ["rewards", config],
        "run": ["run", config],
        "evaluate": ["evaluate", adapter, config],
        "merge": ["merge", adapter, config, "--into", "merged"],
    }
    for command, (code, output) in place.grpo_in_one(calls).items():
        assert code == 0, output
        shown[command] = output
    [place.adapter] = place.root.glob(adapter)
    return place, shown


@pytest.mark.long
@pytest.mark.ci
def test_validate_rewards_evaluate_and_merge_work_as_single_commands(worked):
    place, shown = worked
    assert "200 to train on, 40 held out" in shown["validate"]
    assert "0 checks failed" in shown["rewards"]
    assert "held-out prompts" in shown["evaluate"]
    assert (place.root / "merged" / "model.safetensors").exists()
    assert "saved in " in shown["merge"]
    assert yaml.safe_load(Path(place.written).read_text())["seed"] == 7, "the recorded config is the one that ran"
    # The merged model was held against the last stage, which is evaluated with `evaluation.stages: false` too.
    run_id = place.client.get_model_version("small", "1").run_id
    artifact = place.client.download_artifacts(run_id, "publication/decision.json", str(place.root))
    [check] = [one for one in json.loads(Path(artifact).read_text())["regressions"] if one["p_value"] is not None]
    assert (check["metric"], check["against"], check["passed"]) == ("accuracy", "format", True)


@pytest.mark.long
@pytest.mark.ci
def test_merge_refuses_a_full_folder_and_a_model_without_adapter(worked):
    from flows.single import merge_flow

    place, _ = worked
    config = load_config(str(place.root / "small.yaml"))
    with pytest.raises(ModelError, match="not empty"):
        merge_flow.fn(str(place.adapter), config, place.root / "runs")
    with pytest.raises(ModelError, match="no adapter there"):
        merge_flow.fn(str(place.root), config)


@pytest.mark.long
def test_a_custom_reward_is_used_in_training_and_changing_it_trains_again(worked):
    place, _ = worked
    assert "rewards/brief/mean" in place.child("format", "small").data.metrics
    place.write("mine.py", MINE.replace("400", "401"))
    output = place.grpo("run", "small.yaml")
    assert "validate_data: unchanged, skipped" in output
    assert "train_stage-format: done" in output


@pytest.mark.parametrize("command", ["reproduce m@champion", "lineage m@champion", "rollback m", "download m@champion there"])
def test_a_password_on_the_command_line_is_refused_without_repeating_it(here, command):
    shown = answer(*command.split(), "--tracking-uri", "http://me:planted@127.0.0.1:1", expect=2)
    assert "MLFLOW_TRACKING_URI" in shown
    assert "planted" not in shown
