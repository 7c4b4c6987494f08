"""What plays the conversations of a process: its environments, and the tokenizer whose prompts show their tools."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.limited_model import limited_templates
from grpo_tasks.content.tokenizer import QUESTION, RefusedError, rendered
from grpo_tasks.environments.contract import with_tools
from grpo_tasks.environments.pool import EnvironmentPool
from grpo_tasks.policy.load import load_tokenizer
from grpo_tasks.rollout.conversations.play import Player
from schemas.config.completion import CompletionConfig
from schemas.config.model import ModelConfig
from schemas.config.rollout import InteractionConfig, RolloutConfig
from schemas.results.model import ModelRef


@contextmanager
def player(
    config: InteractionConfig,
    ref: ModelRef,
    model: ModelConfig,
    rollout: RolloutConfig,
    *,
    completion: CompletionConfig,
    log: Path | None = None,
) -> Iterator[Player | None]:
    """What plays the conversations of a rollout; None where completions are one turn each."""
    if not config.active:
        yield None
        return
    # What the policy and the environment say reaches the template too, and no check before the run has seen it.
    with limited_templates(model.path):
        tokenizer = load_tokenizer(ref, model, rollout.chat_template_kwargs)
        tags = completion.reasoning_tags
        opened = opened_reasoning(tokenizer, tags)
        environments = EnvironmentPool(
            config,
            chat_template=tokenizer.chat_template,
            reasoning=tags if opened is None else sorted(tags, key=lambda tag: tag != opened),
            # Where the template opens nothing, the turn alone says whether it begins inside a block.
            starts_inside=None if opened is None else True,
            log=log,
        )
        try:
            values = with_tools(rollout, environments.schemas()).chat_template_kwargs
            yield Player(environments, config, load_tokenizer(ref, model, values))
        finally:
            environments.close()


def opened_reasoning(tokenizer: PreTrainedTokenizerBase, tags: Sequence[str]) -> str | None:
    """The tag of the reasoning block that the chat template opens for the policy's turn; None if there is none."""
    if not tokenizer.chat_template:
        return None
    try:
        whole, before = (rendered(tokenizer, [QUESTION], opened=opened) for opened in (True, False))
    except RefusedError:
        return None
    # Only what the template adds for the turn: a system prompt may speak of the tags.
    opening = whole.removeprefix(before)
    return next((tag for tag in tags if opening.rfind(f"<{tag}>") > opening.rfind(f"</{tag}>")), None)
