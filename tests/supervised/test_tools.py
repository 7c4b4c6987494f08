"""Demonstrations follow prompts that show the tools, whoever offers them."""

import pytest

from grpo_tasks.environments.pool import EnvironmentPool
from grpo_tasks.grpo.__main__ import main
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.rollout import InteractionConfig
from schemas.results.model import ModelRef
from tests.grpo.conftest import journal
from tests.rollout.tool_model import TOOLS, write_model

SHOP = '''

class Shop:
    """An environment that offers the tool."""

    tools = [add]

    def reset(self, row, seed):
        return None

    def step(self, completion):
        return {"messages": [], "done": True, "reward": 0.0}
'''


@pytest.mark.long
def test_a_demonstration_follows_the_prompt_that_shows_the_tools(sums, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tools.py").write_text(TOOLS + SHOP, encoding="utf-8")
    model = str(write_model(tmp_path / "model", weights=True))

    def losses(name, interaction=None, **rollout):
        directory = sums.write(name, start=ModelRef(path=model), model={"path": model}, max_steps=2, rollout=rollout)
        spec = StageSpec.load(directory.spec)
        spec.model_copy(update={"interaction": interaction or InteractionConfig()}).save(directory.spec)
        main(directory.root)
        return [line["loss"] for line in journal(directory)]

    offers = [InteractionConfig(**offer, workers=1) for offer in ({"tools": ["my_tools:add"]}, {"environment": "my_tools:Shop"})]
    schemas = []
    for interaction in offers:
        environments = EnvironmentPool(interaction, chat_template="<tool_call>")
        try:
            schemas.append(environments.schemas())
        finally:
            environments.close()
    assert [one["function"]["name"] for one in schemas[0]] == ["add"]
    assert schemas[0] == schemas[1]
    plain, shown = losses("plain"), losses("shown", chat_template_kwargs={"tools": schemas[0]})
    assert shown != plain
    for interaction in offers:
        assert losses(f"offered-{offers.index(interaction)}", interaction) == shown
