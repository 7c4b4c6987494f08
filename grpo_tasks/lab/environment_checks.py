"""The checks of tools and environments: they are played with scripted turns before any completion is sampled.

What a trial finds is described in environments/trial.py. A conversation that cannot begin, a step that ends its process, and
a leak between conversations are faults. Everything else is an opinion.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_tasks.environments.calls import call_format_of
from grpo_tasks.environments.contract import Message
from grpo_tasks.environments.pool import EnvironmentPool
from grpo_tasks.environments.trial import check_environment, perfect_turns, scripts_of
from grpo_tasks.lab.probe_set import choose_rows
from grpo_tasks.rollout.conversations.play import row_columns, too_long
from schemas.config.completion import CompletionConfig
from schemas.config.rollout import InteractionConfig
from schemas.prompts import PromptRow
from schemas.results.data import LabCheck

TRIED_ROWS = 4
"""Rows whose conversations are played. Each is played three times by two or three players."""


def check_interaction(
    config: InteractionConfig,
    rows: Sequence[PromptRow],
    *,
    chat_template: str,
    count_tokens: Callable[[Sequence[Sequence[Message]]], list[int]],
    completion: CompletionConfig,
    log: Path | None = None,
) -> list[LabCheck]:
    """The checks of the section `interaction`; empty where nothing answers the policy.

    Args:
        config: tools, or an environment.
        rows: all training rows, at least one.
        chat_template: the model's, which names the format of calls.
        count_tokens: tokens of prompts after that template.
        completion: names the tags around reasoning, in which no call counts.
        log: receives what tools and environments print.

    Raises:
        UserError: a tool or the environment cannot be loaded.
    """
    if not config.active:
        return []
    name = config.environment or "tools"
    with EnvironmentPool(config, chat_template=chat_template, reasoning=completion.reasoning_tags, log=log) as pool:
        schemas = pool.schemas()
        columns = [row_columns(row) for row in choose_rows(rows, TRIED_ROWS)]
        perfect = perfect_turns(pool, columns)
        failed = next((text for text in perfect if isinstance(text, str)), None)
        scripts = scripts_of(
            columns,
            schemas,
            perfect=[turns if isinstance(turns, list) else None for turns in perfect],
            max_turns=config.max_turns,
            call_format=call_format_of(config.call_format, chat_template) if schemas else "hermes",
        )
        checks, plays = check_environment(pool, scripts, name=name, timeout_s=config.timeout_s)
    # An environment may leave the prompts of the rows as they are.
    begun = [play.opening.messages for play in plays if play.opening.messages]
    longest = max(count_tokens(begun), default=0) if begun else 0
    if longest > config.max_prompt_tokens:
        detail, fix = too_long(longest, config.max_prompt_tokens), "say less in reset, or raise interaction.max_prompt_tokens"
        begins = LabCheck(function=name, check="begins", outcome="failed", detail=detail, fix=fix)
        checks = [begins, *(one for one in checks if one.check != "begins" or one.outcome == "failed")]
    if failed is not None:
        fix = "let perfect(row) return the turns of a good player as a list of texts"
        checks.append(LabCheck(function=name, check="perfect", outcome="failed", detail=failed[:1_000], fix=fix))
    return checks
