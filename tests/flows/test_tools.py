"""A run whose policy calls a tool: pages show its conversations turn by turn, and the published model shows the tool."""

import html
import re

import pytest
import yaml
from transformers import AutoTokenizer

from tests.flows.place import SMALL, Place
from tests.reporting.pages import assert_self_contained
from tests.rollout.tool_model import write_model

pytestmark = [pytest.mark.xdist_group("tools"), pytest.mark.long, pytest.mark.timeout(1800)]

TOOLS = '''
def add(a: int, b: int) -> str:
    """Adds two numbers, and tries to run in the browser of whoever reads what it said.

    Args:
        a: The first.
        b: The second.
    """
    return f"<script>alert({a + b})</script><img src=x onerror=alert(1)>"


def answered(completions, turns, **columns):
    """Calls that were answered, less those that failed."""
    return [float(sum(turn["calls"] - 2 * turn["errors"] for turn in each)) for each in turns]
'''
STAGE = SMALL["stages"][0] | {"name": "calls", "rewards": ["answered"]}
CONFIG = SMALL | {
    "interaction": {"tools": ["my_tools:add"], "workers": 1, "max_turns": 3, "max_tokens": 400},
    "completion": {"format": "none"},
    "rollout": {"max_completion_length": 24},
    "validation": {"max_prompt_length": 1000},
    "rewards": {"functions": {"answered": {"function": "my_tools:answered"}}},
    "promotion": {"metric": "reward"},
    "stages": [STAGE],
}
SCRIPT = "<script>alert(3)</script><img src=x onerror=alert(1)>"
TURN = re.compile(r"\[turn 1\] .*?\[tool\] " + re.escape(html.escape(SCRIPT, quote=False)), re.DOTALL)
"""A turn with what the tool said to it, as text."""


@pytest.fixture(scope="module")
def played(tmp_path_factory, prefect_api):
    """Two runs with a hostile tool that differ in their seed."""
    place = Place(tmp_path_factory.mktemp("played"), prefect_api)
    place.write("my_tools.py", TOOLS)
    model = write_model(place.root / "model", weights=True)
    place.write("small.yaml", yaml.safe_dump(CONFIG | {"model": {"path": str(model)}}))
    for seed in ("1", "2"):
        place.grpo("run", "small.yaml", "--set", f"seed={seed}")
    return place


def artifact(place, run, path):
    return place.root / place.client.download_artifacts(run.info.run_id, path, str(place.root))


def parents(place):
    return [run for run in place.runs("small") if "mlflow.parentRunId" not in run.data.tags]


def assert_shows_turns(text):
    """The page shows conversations, and nothing in them is more than text."""
    assert_self_contained(text)
    assert TURN.search(text)
    assert "<script>alert" not in text
    assert "<img src=x" not in text


def test_the_report_shows_conversations_turn_by_turn_as_text(played):
    assert_shows_turns(artifact(played, parents(played)[0], "report/report.html").read_text(encoding="utf-8"))


def test_the_comparison_shows_conversations_turn_by_turn_as_text(played):
    first, second = (run.info.run_id for run in parents(played))
    played.grpo("compare", first, second)
    assert_shows_turns((played.root / "comparison.html").read_text(encoding="utf-8"))


def test_the_published_model_shows_the_tool_of_its_training(played):
    played.grpo("download", "small/1", "mine")
    shown = AutoTokenizer.from_pretrained(played.root / "mine").apply_chat_template(
        [{"role": "user", "content": "What is 1 + 2?"}], tokenize=False, add_generation_prompt=True
    )
    assert '"name": "add"' in shown
    assert CONFIG["data"]["system_prompt"] in shown
