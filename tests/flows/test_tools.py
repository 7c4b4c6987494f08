"""A run whose policy calls a tool: pages show its conversations turn by turn, as text."""

import html
import re

import pytest
import yaml

from tests.flows.place import SMALL, Place
from tests.rollout.tool_model import write_model
from tests.web_pages import assert_self_contained

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


def test_report_and_comparison_show_conversations_turn_by_turn_as_text(played):
    first, second = (run.info.run_id for run in played.runs("small") if "mlflow.parentRunId" not in run.data.tags)
    report = played.client.download_artifacts(first, "report/report.html", str(played.root))
    played.grpo("compare", first, second)
    for page in (played.root / report, played.root / "comparison.html"):
        text = page.read_text(encoding="utf-8")
        assert_self_contained(text)
        assert TURN.search(text)
        assert "<script>alert" not in text
        assert "<img src=x" not in text
