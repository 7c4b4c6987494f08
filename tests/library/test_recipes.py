"""What the best-known introductions to GRPO show first, each run by the engine as it stands there.

prompt-only data with TRL's `reward_len`; three composed rewards; a reward for each token; `<search>` as a stop string
"""

import json

import polars as pl
import pytest

from grpo_tasks.library import load_data, train_stage
from grpo_tasks.stage.stage_dir import StageDir
from schemas.config.load import check_config
from tests.rollout.conftest import widened  # noqa: F401 - a fixture

pytestmark = [pytest.mark.long, pytest.mark.ci, pytest.mark.xdist_group("recipes")]

SUMS = [{"question": f"What is {n} + 27?", "answer": str(n + 27)} for n in range(10, 50)]
MODULE = '''
import re


def reward_len(prompts, completions):
    """TRL's first example: strings in, strings out, no **kwargs."""
    assert all(isinstance(text, str) for text in [*prompts, *completions])
    return [-abs(20 - len(completion)) for completion in completions]


def correct(prompts, completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    found = [re.search(r"<answer>(.*?)</answer>", text, re.S) for text in texts]
    return [2.0 if one and one[1].strip() == right else 0.0 for one, right in zip(found, answer)]


def follows_format(completions, **kwargs):
    pattern = r"^<reasoning>.*?</reasoning><answer>.*?</answer>$"
    return [1.0 if re.match(pattern, completion[0]["content"], re.S) else 0.0 for completion in completions]


def brief(completions, **kwargs):
    return [0.5 if len(completion[0]["content"]) < 60 else 0.0 for completion in completions]


def first_half(completions, completion_ids, **kwargs):
    """Per token: the first half of the completion earns, the second half costs."""
    return [[1.0 if place < len(ids) / 2 else -1.0 for place in range(len(ids))] for ids in completion_ids]


def searches(completions, **kwargs):
    return [1.0 if completion[0]["content"].endswith("<search>") else 0.0 for completion in completions]
'''


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train two updates on rows with functions of the module; the metrics of each update, and all completions."""
    (tmp_path / "own.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)

    def run(rows, rewards, **sections):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        stage = {"name": "s", "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 16, "learning_rate": 1e-3}
        tree = {
            "data": {"train": [{"path": "rows.jsonl"}], "eval_fraction": 0.2, **sections.pop("data", {})},
            "rewards": {"functions": rewards},
            "rollout": {"max_completion_length": 40, **sections.pop("rollout", {})},
            "stages": [stage | {"rewards": [*rewards], "skip_dead_groups": False}],
            "resources": {"num_threads": 1},
            **sections,
        }
        config = check_config(tree)
        train_stage(config, "s", load_data(config, "data"), "stage")
        directory = StageDir(tmp_path / "stage")
        metrics = [json.loads(line)["metrics"] for line in directory.journal.read_text().splitlines()]
        tables = sorted((tmp_path / "stage" / "completions").glob("*.parquet"))
        assert len(metrics) == 2
        return metrics, pl.concat([pl.read_parquet(table) for table in tables], how="diagonal_relaxed")

    return run


def test_prompts_alone_with_reward_len_as_in_trls_first_example(train):
    rows = [{"prompt": f"The number {number} is"} for number in range(40)]
    metrics, table = train(rows, {"reward_len": {"function": "own:reward_len"}}, data={"answer_column": None})
    wanted = [-abs(20 - len(text)) for text in table["completion"]]
    assert table["reward"].to_list() == pytest.approx(wanted)
    assert metrics[0]["rewards/reward_len/mean"] == metrics[0]["reward"] < 0


def test_three_composed_rewards_are_summed_with_their_weights(train):
    functions = {
        "correct": {"function": "own:correct"},
        "follows_format": {"function": "own:follows_format", "weight": 0.5},
        "brief": {"function": "own:brief"},
    }
    metrics, table = train(SUMS, functions, data={"system_prompt": "Reply with <reasoning>...</reasoning><answer>...</answer>."})
    total = (
        metrics[0]["rewards/correct/mean"] + 0.5 * metrics[0]["rewards/follows_format/mean"] + metrics[0]["rewards/brief/mean"]
    )
    assert metrics[0]["reward"] == pytest.approx(total, abs=1e-6)
    assert table["reward"].n_unique() > 1


def test_a_reward_for_each_token_is_averaged_for_the_completion(train):
    metrics, table = train(SUMS, {"first_half": {"function": "own:first_half"}})
    assert table["reward"].is_between(0.0, 1.0).all()
    assert metrics[0]["grad_norm"] > 0, "tokens of one completion have different advantages"


@pytest.mark.parametrize("included", [True, False])
def test_search_as_stop_ends_a_completion_and_may_stay(train, widened, included):  # noqa: F811
    rollout = {"stop": ["<search>"], "include_stop_str_in_output": included}
    rewards = {"searches": {"function": "own:searches"}}
    metrics, table = train(SUMS, rewards, rollout=rollout, model={"path": widened.path})
    ends = table["completion"].str.ends_with("<search>")
    assert not table["completion"].str.contains("<search>.").any()
    assert ends.any() == included
    assert (table["reward"] > 0).to_list() == ends.to_list()
    assert (metrics[0]["reward"] > 0) == included
