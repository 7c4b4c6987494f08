"""Environments of the package verifiers go through the lab, three updates and an evaluation as they are.

Two are generators of reasoning_gym in the class that verifiers has for them; both packages come from the index. Three are
written here as packages of that kind are: a module with `load_environment`, its classes, and nothing of this project. Only their
data is made here. Skipped where the packages are not installed.
"""

import json
import os

import polars as pl
import pytest
import yaml

from grpo_tasks.environments.verifiers_adapter import write_rows
from tests.flows.place import SMALL
from tests.rollout.tool_model import TOOLS, write_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SINGLE = '''
import verifiers as vf
from datasets import Dataset


def load_environment(num: int = 40) -> vf.Environment:
    """Sums in tags."""
    parser = vf.XMLParser(["reasoning", "answer"], answer_field="answer")

    def right(completion, answer, parser) -> float:
        return 1.0 if parser.parse_answer(completion) == answer else 0.0

    def tagged(completion) -> float:
        return completion[-1]["content"].count("<answer>") / 2

    rows = [{"question": f"What is {number + 11} + 27?", "answer": str(number + 38)} for number in range(num)]
    rubric = vf.Rubric(funcs=[right, tagged, parser.get_format_reward_func()], weights=[1.0, 0.5, 0.2], parser=parser)
    prompt = "Reply with <reasoning>...</reasoning><answer>...</answer>."
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), parser=parser, rubric=rubric, system_prompt=prompt)
'''
MULTI = '''
import verifiers as vf
from datasets import Dataset


class Nearer(vf.MultiTurnEnv):
    """The environment says where the number of digits has to go."""

    async def setup_state(self, state):
        state["seen"] = []
        return state

    async def env_response(self, messages, state, **kwargs):
        state["seen"].append(sum(letter.isdigit() for letter in messages[-1]["content"]))
        wanted = int(state["answer"])
        word = "more" if state["seen"][-1] < wanted else "fewer"
        return [{"role": "user", "content": f"{word} <|im_end|>"}]


def load_environment(num: int = 40, max_turns: int = 3) -> vf.Environment:
    """Write as many digits as the question wants."""

    async def near(completion, answer) -> float:
        digits = sum(letter.isdigit() for letter in completion[-1]["content"])
        return -abs(digits - int(answer)) / 10

    rows = [{"question": f"Write {number} digits: {number + 10}.", "answer": str(number % 9)} for number in range(num)]
    return Nearer(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[near]), max_turns=max_turns)
'''
TOOL = f'''
import verifiers as vf
from datasets import Dataset

{TOOLS}

def load_environment(num: int = 40) -> vf.Environment:
    """A calculator."""

    def asked(completion) -> float:
        said = [message["content"] for message in completion if message["role"] == "tool"]
        return float(sum(text.isdigit() for text in said))

    rows = [{{"question": f"What is {{number}} + 1?", "answer": str(number + 1)}} for number in range(num)]
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[add], rubric=vf.Rubric(funcs=[asked]), max_turns=3)
'''
KINDS = {"single": SINGLE, "multi": MULTI, "tool": TOOL}
GYM = "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv"
SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
GYMS = {"countdown": "countdown", "mixed": [{"name": "chain_sum", "weight": 1, "config": SUM}, "spell_backward"]}
"""Generators of reasoning_gym, as the argument `gym` of its environment takes them."""
ADAPTER = "grpo_tasks.environments.verifiers_adapter:VerifiersEnvironment"
CONFIG = SMALL | {
    "data": {"train": [{"path": "train.jsonl"}], "eval": [{"path": "eval.jsonl"}]},
    "interaction": {"environment": ADAPTER, "workers": 1, "max_turns": 4, "max_tokens": 400, "timeout_s": 60.0},
    "completion": {"format": "none"},
    "rollout": {"max_completion_length": 24},
    "validation": {"max_prompt_length": 1000},
    "promotion": {"metric": "reward"},
    "stages": [SMALL["stages"][0] | {"name": "played", "rewards": ["environment"], "max_steps": 3}],
}


@pytest.fixture
def ready(place, monkeypatch):
    """A working directory with the environment of a kind as if its package were installed, its rows, and a config."""
    pytest.importorskip("verifiers")
    found = os.pathsep.join(filter(None, [str(place.root), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", found)
    monkeypatch.syspath_prepend(place.root)

    def write(kind):
        settings = {"id": f"vf-{kind}"}
        if kind in KINDS:
            place.write(f"vf_{kind}.py", KINDS[kind])
        else:
            pytest.importorskip("reasoning_gym")
            settings = {"id": GYM, "arguments": {"gym": GYMS[kind], "num_train_examples": 40, "num_eval_examples": 1}}
        assert write_rows(path=place.root / "rows.jsonl", **settings) == 40
        lines = (place.root / "rows.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        place.write("train.jsonl", "".join(lines[:30]))
        place.write("eval.jsonl", "".join(lines[30:]))
        config = CONFIG | {"interaction": CONFIG["interaction"] | {"settings": settings}}
        if kind == "tool":
            # The model of the demo shows no tools; this one is the same with a template and tokens that do.
            config |= {"model": {"path": str(write_model(place.root / "model", weights=True))}}
        place.write("small.yaml", yaml.safe_dump(config))
        return place

    return write


@pytest.mark.parametrize("kind", [*KINDS, *GYMS])
def test_an_environment_of_verifiers_goes_through_a_whole_run(ready, kind):
    place = ready(kind)
    place.grpo("run", "small.yaml")
    (stage,) = (place.root / "runs" / "small" / "train_stage").iterdir()
    lines = [json.loads(line)["metrics"] for line in (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 3
    assert {line["conversations/errors"] for line in lines} == {0.0}
    if kind in KINDS:
        assert any(line["reward_std"] > 0 for line in lines)
    tables = pl.concat([pl.read_parquet(path) for path in sorted(stage.glob("completions/*.parquet"))], how="diagonal_relaxed")
    played = [json.loads(text) for text in tables["conversation"]]
    assert {one["ending"] for one in played} <= ENDINGS.get(kind, {"done"})
    assert {len(one["turns"]) for one in played} <= TURNS.get(kind, {1})
    said = {message["content"] for one in played for turn in one["turns"] for message in turn["answers"]}
    assert ANSWERS.get(kind, set()) <= said
    (lab,) = (place.root / "runs" / "small" / "probe_rewards").iterdir()
    report = json.loads((lab / "result.json").read_text(encoding="utf-8"))
    checks = {check["check"]: check["outcome"] for check in report["checks"]}
    assert {"begins", "faults", "determinism", "leak", "speed"} <= set(checks)
    assert {checks[name] for name in ("begins", "faults", "determinism", "leak")} == {"passed"}


ENDINGS = {"multi": {"done", "tokens"}, "tool": {"done", "tokens"}}
TURNS = {"multi": {1, 2, 3}, "tool": {1, 2, 3}}
ANSWERS = {"multi": {"more <|im_end|>", "fewer <|im_end|>"}, "tool": {"3", "50"}}
