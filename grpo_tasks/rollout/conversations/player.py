"""What plays the conversations of a process: its environments, and the tokenizer whose prompts show their tools."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_tasks.environments.offered import open_environments, with_tools
from grpo_tasks.policy.load import load_tokenizer
from grpo_tasks.rollout.conversations.play import Player
from schemas.config.learning.interaction import InteractionConfig
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.results.model import ModelRef


@contextmanager
def player(
    config: InteractionConfig, ref: ModelRef, model: ModelConfig, rollout: RolloutConfig, *, log: Path | None = None
) -> Iterator[Player | None]:
    """What plays the conversations of a rollout; None where completions are one turn each.

    Args:
        config: the section `interaction`.
        ref: the model that samples.
        model: its settings.
        rollout: for the variables of the chat template.
        log: file that receives what tools and environments print.

    Raises:
        UserError: a tool or the environment cannot be loaded.
    """
    if not config.active:
        yield None
        return
    template = load_tokenizer(ref, model, rollout.chat_template_kwargs).chat_template
    environments = open_environments(config, chat_template=template, log=log)
    try:
        values = with_tools(rollout, environments.schemas()).chat_template_kwargs
        yield Player(environments, config, load_tokenizer(ref, model, values))
    finally:
        environments.close()
