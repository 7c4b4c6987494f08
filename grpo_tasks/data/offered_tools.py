"""A config whose prompts show the tools that it offers."""

from grpo_tasks.environments.contract import with_tools
from grpo_tasks.environments.pool import EnvironmentPool
from schemas.config.run import RunConfig


def with_offered_tools(config: RunConfig) -> RunConfig:
    """The config whose chat template shows the tools of its section `interaction`, for a process that plays no conversations.

    `UserError` where a tool or the environment cannot be loaded.
    """
    if not config.interaction.active:
        return config
    # Imports transformers, which a run without tools does not need here.
    from grpo_tasks.data.chat_tokens import load_counter

    tokenizer = load_counter(config.model).tokenizer
    environments = EnvironmentPool(
        config.interaction, chat_template=tokenizer.chat_template, response_template=tokenizer.response_template
    )
    try:
        return config.model_copy(update={"rollout": with_tools(config.rollout, environments.schemas())})
    finally:
        environments.close()
