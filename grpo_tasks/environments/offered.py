"""Where the environments of a process come from, and the schemas of their tools as a variable of the chat template."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_tasks.environments.contract import Environments
from schemas.config.completion import THINK
from schemas.config.learning.interaction import InteractionConfig
from schemas.config.rollout import RolloutConfig

Template = str | Mapping[str, str] | None
"""A tokenizer's chat template, or several by name."""


def open_environments(
    config: InteractionConfig,
    *,
    chat_template: Template = None,
    reasoning: Sequence[str] = THINK,
    starts_inside: bool | None = None,
    log: Path | None = None,
) -> Environments:
    """The environments of a rollout, in worker processes. The caller closes them.

    Args:
        config: the section `interaction`; active.
        chat_template: the model's, which names the format of calls.
        reasoning: names of the tags around reasoning. Calls inside do not count.
        starts_inside: True if every prompt ends inside a block of the first of these tags; see calls.py.
        log: file that receives what tools and environments print.
    """
    # Most runs have no environment.
    from grpo_tasks.environments.pool import EnvironmentPool

    if isinstance(chat_template, Mapping):
        # transformers takes the one of this name where there are tools.
        chat_template = chat_template.get("tool_use") or chat_template.get("default")
    template = chat_template or ""
    return EnvironmentPool(config, chat_template=template, reasoning=reasoning, starts_inside=starts_inside, log=log)


def with_tools(rollout: RolloutConfig, schemas: Sequence[Mapping[str, Any]]) -> RolloutConfig:
    """The section `rollout` whose chat template shows these tools in every prompt; for this process, not for a file."""
    if not schemas:
        return rollout
    values = {**rollout.chat_template_kwargs, "tools": [dict(schema) for schema in schemas]}
    return rollout.model_copy(update={"chat_template_kwargs": values})
