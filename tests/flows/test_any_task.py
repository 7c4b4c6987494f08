"""Tasks of two kinds run from a file to a promoted champion, and the comparison page shows their figures.

Of a JSON format and of rewards alone the examples json-task and style-task say the same (tests/examples).
"""

import json

import pytest
import yaml

from tests.flows.place import Place

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("examples"), pytest.mark.timeout(1800)]

REWARDS = '''
def brief(prompts, completions, **columns):
    """1.0 for an empty text, 0.0 from 200 characters on; what a model learns within a few updates."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [max(0.0, 1.0 - len(text) / 200) for text in texts]


def reward_len(prompts, completions, **kwargs):
    """As in TRL's documentation: standard format, so that completions are strings."""
    assert all(isinstance(prompt, str) for prompt in prompts)
    return [-abs(20 - len(completion)) / 20 for completion in completions]
'''
SUMS = [
    {"question": f"What is {left} + {right}?", "answer": str(left + right)} for left in range(10, 20) for right in range(20, 26)
]
OWN = {
    "brief": {"function": "my_rewards:brief"},
    "short": {"function": "my_rewards:brief", "weight": 0.5},
    "reward_len": {"function": "my_rewards:reward_len"},
}

TASKS = {
    "plain": {
        "rows": [{"prompt": f"{left} + {right} =", "answer": str(left + right)} for left in range(10, 20) for right in range(6)],
        "completion": {"format": "regex", "pattern": "([0-9]+)"},
        "rewards": ["reward_len"],
        "figures": ["reward", "accuracy"],
    },
    "mixture": {
        "rows": [
            *({**row, "task": "sums"} for row in SUMS),
            *({"question": f"Say {n}.", "answer": str(n), "task": "echo"} for n in range(60)),
        ],
        "data": {
            "task_column": "task",
            "tasks": {"sums": {"weight": 2.0, "rewards": ["brief"]}, "echo": {"rewards": ["short"]}},
        },
        "completion": {},
        "rewards": ["brief", "short"],
        "figures": ["reward/task/sums", "reward/task/echo", "accuracy/task/sums", "accuracy/task/echo"],
    },
}


def config_of(name, task):
    return {
        "name": name,
        "model": {"path": "embedded:base", "lora": {"r": 8}},
        "data": {"train": [{"path": "rows.jsonl"}], "eval_fraction": 0.3, **task.get("data", {})},
        "validation": {"max_prompt_length": 64},
        "completion": task["completion"],
        "rewards": {"functions": {key: OWN[key] for key in task["rewards"] if key in OWN}},
        "lab": {"num_rows": 4, "num_prompts": 4},
        "rollout": {"max_completion_length": 48},
        "stages": [
            {
                "name": "only",
                "rewards": task["rewards"],
                "max_steps": 12,
                "num_generations": 4,
                "per_device_train_batch_size": 32,
                "learning_rate": 2e-3,
                "beta": 0.0,
            }
        ],
        "evaluation": {"max_prompts": 12, "num_samples": 4, "stages": False},
        # A tiny run improves a little: enough for a champion, not for a claim.
        "promotion": {"metric": "reward", "alpha": 0.4, "max_format_drop": 1.0, "max_truncation_growth": 1.0},
        "resources": {"num_threads": 1},
    }


@pytest.mark.parametrize("name", TASKS)
def test_a_task_of_any_kind_ends_in_a_promoted_champion(name, tmp_path, prefect_api):
    task, place = TASKS[name], Place(tmp_path, prefect_api)
    place.write("rows.jsonl", "\n".join(map(json.dumps, task["rows"])))
    place.write("my_rewards.py", REWARDS)
    place.write("config.yaml", yaml.safe_dump(config_of(name, task)))
    place.grpo("run", "config.yaml")
    version = place.client.get_model_version_by_alias(name, "champion")
    assert str(version.version) == "1"
    place.grpo("compare", f"{name}/1", f"{name}/1")
    page = (place.root / "comparison.html").read_text()
    [run] = [run for run in place.runs(name) if "mlflow.parentRunId" not in run.data.tags]
    for figure in task["figures"]:
        assert any(figure in key for key in run.data.metrics), figure
        assert figure in page
