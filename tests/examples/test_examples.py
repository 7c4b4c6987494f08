"""Each example runs through the whole pipeline, with two updates a stage; what is cheap about it is checked one by one."""

import importlib.util
import json
import runpy
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_tasks.environments.pool import EnvironmentPool
from schemas.config.load import load_config
from tests.flows.place import Place

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
REAL_MODEL = "real-model"
"""This example is for a model of other people, which is not part of the repository."""
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/config.yaml") if path.parent.name != REAL_MODEL)
QUICK = {
    "stages.0.max_steps": 2,
    "stages.1.max_steps": 2,
    "lab.num_rows": 4,
    "lab.num_prompts": 4,
    "evaluation.max_prompts": 8,
    "evaluation.num_samples": 2,
    "evaluation.stages": "false",
    "resources.num_threads": 1,
}


def module_of(example, name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / example / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_are_these():
    alone = ["demonstrations", "json-task", "multiple-choice", "my-csv", "own-model", "style-task", "word-problems"]
    assert sorted(NAMES) == sorted([*alone, "calculator", "game"])


@pytest.mark.parametrize("name", NAMES)
def test_every_example_has_the_same_files(name):
    files = {path.name for path in (EXAMPLES / name).iterdir()}
    assert {"README.md", "config.yaml", "make_data.py"} <= files
    assert files & {"data.jsonl", "data.csv"}


@pytest.mark.parametrize("name", NAMES)
def test_the_data_of_an_example_is_what_its_script_writes(name, tmp_path):
    [data] = (EXAMPLES / name).glob("data.*")
    runpy.run_path(shutil.copy(EXAMPLES / name / "make_data.py", tmp_path), run_name="__main__")
    assert (tmp_path / data.name).read_bytes() == data.read_bytes()


OTHERS = [(path.parent.name, "gpu.yaml", "Qwen") for path in sorted(EXAMPLES.glob("*/gpu.yaml"))]


OTHERS += [("calculator", "without_tool.yaml", "calculator-without-tool"), ("calculator", "xml.yaml", "calculator-xml")]


@pytest.mark.parametrize(("name", "file", "named"), OTHERS)
def test_the_other_runs_of_an_example_are_valid_configs(name, file, named, tmp_path, monkeypatch):
    shutil.copytree(EXAMPLES / name, tmp_path / name)
    monkeypatch.chdir(tmp_path / name)
    outcome = CliRunner().invoke(app, ["run", file, "--dry-run"])
    assert outcome.exit_code == 0, outcome.output
    assert named in outcome.output


def test_held_out_customers_and_items_are_in_no_training_message(tmp_path, monkeypatch):
    shutil.copytree(EXAMPLES / REAL_MODEL, tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    train, test = ([json.loads(line) for line in Path(name).read_text().splitlines()] for name in ("train.jsonl", "test.jsonl"))
    runpy.run_path("make_data.py", run_name="__main__")
    for name in ("train.jsonl", "test.jsonl"):
        assert Path(name).read_bytes() == (EXAMPLES / REAL_MODEL / name).read_bytes()
    for column in ("name", "item"):
        assert not {row[column] for row in train} & {row[column] for row in test}
    assert all(row[column] in row["message"] for row in train + test for column in ("name", "item", "order"))
    outcome = CliRunner().invoke(app, ["run", "config.yaml", "--dry-run", "--set", "model.path=embedded:base"])
    assert outcome.exit_code == 0, outcome.output


@pytest.mark.parametrize(
    ("reply", "broken"),
    [
        ("Hello Nora, I am sorry about the desk lamp of order 48213. Shall we send another one?", []),
        ("Hello Nora, I am sorry about the desk lamp of order 48213.", ["asks"]),
        (
            "Hello Otto, we apologize for the tea kettle of order 48214. Shall we help?",
            ["names_customer", "names_item", "names_order"],
        ),
        ("Nora, the Desk Lamp from my order 48213 arrived broken. Why?", ["apologizes", "own_words"]),
        ("Sorry, Nora! The desk lamp, 48213: " + "we will send another one, " * 8 + "yes?", ["short"]),
        ("", ["short", "asks", "apologizes", "own_words", "names_customer", "names_item", "names_order"]),
    ],
)
def test_each_rule_of_the_shop_sees_its_own_fault(reply, broken):
    rewards = module_of(REAL_MODEL, "rewards")
    functions = load_config(EXAMPLES / REAL_MODEL / "config.yaml").rewards.functions
    message = "Hello, this is Nora. The desk lamp from my order 48213 arrived broken. What can I do?"
    given = {
        "prompts": [[{"role": "system", "content": "Reply."}, {"role": "user", "content": message}]],
        "completions": [[{"role": "assistant", "content": reply}]],
        "name": ["Nora"],
        "item": ["desk lamp"],
        "order": ["48213"],
    }
    assert [name for name in functions if getattr(rewards, name)(**given) != [1.0]] == broken
    assert rewards.complete(**given) == [float(not broken)]


def test_demonstrations_of_the_calculator_are_right_and_call_nothing():
    module = module_of("calculator", "calculator")
    rows = [json.loads(line) for line in (EXAMPLES / "calculator" / "data.jsonl").read_text().splitlines()]
    assert all(row["answer"] in module.from_memory(row) and "tool_call" not in module.from_memory(row) for row in rows)


@pytest.mark.parametrize(("file", "function"), [("config.yaml", "demonstration"), ("xml.yaml", "demonstration_in_xml")])
def test_the_calls_that_the_calculator_demonstrates_are_answered(file, function, tmp_path, monkeypatch):
    """As the policy will write them: in the format of the config, by the tools of the config."""
    shutil.copytree(EXAMPLES / "calculator", tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    config = load_config(file)
    assert config.stages[0].demonstrations.function == f"calculator:{function}"
    row = json.loads(Path("data.jsonl").read_text().splitlines()[0])
    call, answer, last = getattr(module_of("calculator", "calculator"), function)(row)
    with EnvironmentPool(config.interaction) as pool:
        pool.begin([(0, {"messages": [{"role": "user", "content": row["question"]}]}, 1)])
        [observed] = pool.answer([(0, call["content"])])
        [done] = pool.answer([(0, last["content"])])
    assert [message["content"] for message in observed.messages] == [row["answer"]] == [answer["content"]]
    assert (observed.done, done.done, done.error) == (False, True, None)


def test_the_reward_of_my_csv_wants_reply_and_currency():
    reward = module_of("my-csv", "rewards").names_currency
    replies = {
        "<reasoning>2 times 4 pounds is 8.</reasoning><answer>8</answer>": 1.0,
        "<reasoning>2 times 4 is 8.</reasoning><answer>8</answer>": 0.0,
        "<reasoning>2 times 4 pounds is 8.</reasoning><answer></answer>": 0.0,
        "<reasoning>2 times 4 pounds is 8.</reasoning><answer>\u200b</answer>": 0.0,
        "pounds pounds pounds": 0.0,
    }
    completions = [[{"role": "assistant", "content": text}] for text in replies]
    assert reward(None, completions, currency=["pounds"] * len(replies), answer=["8"] * len(replies)) == list(replies.values())


FIGURES = {"json-task": ("reward", "accuracy", "format_rate"), "style-task": ("reward",)}
"""What a run measures where a reply has a format, and where no row has a ground truth."""
LEARNT = {"calculator": "accuracy", "game": "reward"}
"""Examples of conversations, which train until they have learnt their task."""


@pytest.mark.long
@pytest.mark.xdist_group("examples")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in LEARNT])
def test_an_example_runs_through_the_whole_pipeline(name, tmp_path, prefect_api):
    shutil.copytree(EXAMPLES / name, tmp_path / "mine")
    if (script := tmp_path / "mine" / "copy_model.py").exists():
        runpy.run_path(str(script), run_name="__main__")
    place = Place(tmp_path / "mine", prefect_api)
    stages = len(yaml.safe_load((EXAMPLES / name / "config.yaml").read_text(encoding="utf-8"))["stages"])
    quick = {key: value for key, value in QUICK.items() if key != "stages.1.max_steps" or stages > 1}
    require_version(place, name, place.grpo("run", "config.yaml", *overrides(quick)))
    if name in FIGURES:
        place.grpo("compare", f"{name}/1", f"{name}/1")
        page, measured = (place.root / "comparison.html").read_text(), " ".join(place.parent(name).data.metrics)
        assert all(figure in page and figure in measured for figure in FIGURES[name])
        assert ("accuracy" in measured) == ("accuracy" in FIGURES[name])


ON_REAL_MODEL = QUICK | {
    "stages.0.per_device_train_batch_size": 16,
    "stages.1.per_device_train_batch_size": 16,
    "rollout.max_completion_length": 40,
    "lab.num_prompts": 2,
    "lab.strict": "false",
    "evaluation.max_prompts": 2,
    "evaluation.max_truncated": 1.0,
}
"""In 40 tokens and two groups this model earns no reward for a form that nobody has shown it. A strict lab is right to stop."""


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "own-model"] + [REAL_MODEL])
def test_an_example_runs_on_a_real_model(name, real_model, tmp_path, prefect_api):
    """Two updates a stage teach nothing; template, tokens, calls, rewards and merge are those of a model of other people."""
    shutil.copytree(EXAMPLES / name, tmp_path / "mine")
    place = Place(tmp_path / "mine", prefect_api)
    config = yaml.safe_load((EXAMPLES / name / "config.yaml").read_text(encoding="utf-8"))
    short = {key: value for key, value in ON_REAL_MODEL.items() if not key.startswith("stages.1") or len(config["stages"]) > 1}
    shown = place.grpo("run", "config.yaml", *overrides(short | {"model.path": real_model}), timeout=1700)
    assert f"{config['name']} version 1" in shown


def require_version(place, name, shown):
    """Every row was accepted, and the model is registered."""
    assert f"{name} version 1" in shown
    [report] = (place.root / "runs" / name / "validate_data").glob("*/result.json")
    assert json.loads(report.read_text())["quarantined"] == 0


SHORT = {"stages.0.max_steps": 400, "stages.1.max_steps": 10, "evaluation.stages": "false"}
SHORT |= {"evaluation.max_prompts": 100, "evaluation.num_samples": 1, "resources.num_threads": 1}
WHOLE = {"evaluation.stages": "false", "resources.num_threads": 1}
WON = {"stages.1.early_stop": "{metric: reward, target: 0.94}"}
"""Nearly every game of the last ten updates was won: more of the 200 would only say so again."""


def overrides(settings):
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.long
@pytest.mark.xdist_group("figures")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "metric"), LEARNT.items())
def test_the_examples_of_conversations_reach_their_figures(name, metric, tmp_path, prefect_api):
    shutil.copytree(EXAMPLES / name, tmp_path / "mine")
    place = Place(tmp_path / "mine", prefect_api)
    settings = WHOLE | (WON if name == "game" else {})
    require_version(place, name, place.grpo("run", "config.yaml", *overrides(settings), timeout=1700))
    found = {}
    for path in (place.root / "runs" / name / "evaluate_model").glob("*/result.json"):
        found[path.parent.name.split("-")[0]] = json.loads(path.read_text())["metrics"][metric]["value"]
    assert found["base"] < 0.1, "the base model cannot do it"
    assert found["merged"] > 0.9


@pytest.mark.long
@pytest.mark.xdist_group("figures")
@pytest.mark.timeout(1800)
def test_without_its_tool_the_calculator_cannot_do_it(tmp_path, prefect_api):
    shutil.copytree(EXAMPLES / "calculator", tmp_path / "mine")
    place = Place(tmp_path / "mine", prefect_api)
    place.grpo("run", "without_tool.yaml", *overrides(SHORT), timeout=1700)
    [result] = (place.root / "runs" / "calculator-without-tool" / "evaluate_model").glob("merged-*/result.json")
    figures = json.loads(result.read_text())["metrics"]
    assert figures["accuracy"]["value"] < 0.1
    # It has learnt to answer.
    assert figures["format_rate"]["value"] > 0.5


def test_the_calculator_calculates_and_executes_nothing():
    calculate = module_of("calculator", "calculator").calculate
    assert calculate("321 * 456") == 146376
    assert calculate("-(2 + 3) * 4") == -20
    for text in ("__import__('os').getcwd()", "2 ** 9", "abs(3)", "'a' * 3", "1.5 + 1", "True + 1", "(" * 40, "9" * 65):
        with pytest.raises((ValueError, SyntaxError)):
            calculate(text)


def test_the_games_perfect_player_wins_the_same_game_again():
    module = module_of("game", "game")
    rows = [json.loads(line) for line in (EXAMPLES / "game" / "data.jsonl").read_text().splitlines()]
    for row in rows:
        game = module.Sticks()
        moves = game.perfect(row)
        answers = []
        for _ in range(2):
            game.reset(row, 0)
            answers.append([game.step(move) for move in moves])
        assert answers[0] == answers[1]
        assert answers[0][-1]["reward"] == 1.0
        demonstration = module.random_game(row)
        assert demonstration == module.random_game(row)
        assert [message["role"] for message in demonstration] == ["assistant", "user"] * (len(demonstration) // 2) + ["assistant"]
    illegal = module.Sticks()
    illegal.reset({"sticks": 2, "game": 1}, 0)
    assert illegal.step("3") == module.end(0.0, "not a move")
