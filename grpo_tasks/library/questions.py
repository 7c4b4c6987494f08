"""Asks a model questions in this process: prompts as in training, tools and environments included. Imports torch.

question -> system prompt of the config -> chat template, which shows the tools -> completion
                                                           tools or environment <-> turns, where the config names them
"""

from collections.abc import Sequence

from grpo_tasks.data.table import prompt_id
from grpo_tasks.policy.chat import prompt_ids
from grpo_tasks.policy.load import load_policy, load_tokenizer, pick_device
from grpo_tasks.rollout.conversations.play import Start
from grpo_tasks.rollout.conversations.player import player
from grpo_tasks.rollout.engine import Completion, Request, Sampling, completion_seed
from grpo_tasks.rollout.local import LocalEngine
from schemas.config.run import RunConfig
from schemas.prompts import PromptRow
from schemas.results.model import ModelRef


def ask(
    config: RunConfig, model: ModelRef, questions: Sequence[str], *, num_samples: int, temperature: float
) -> list[list[Completion]]:
    """For each question its completions.

    Args:
        config: as `generate` takes it (steps.py).
        model: the model.
        questions: one user message each.
        num_samples: completions per question.
        temperature: 0 always takes the most likely token.

    Raises:
        UserError: the model, a tool or the environment cannot be loaded.
    """
    system = config.data.system_prompt
    before = [{"role": "system", "content": system}] if system else []
    chats = [(*before, {"role": "user", "content": question}) for question in questions]
    rows = [PromptRow(prompt_id(chat, None), "question", number, chat, None, 0, {}) for number, chat in enumerate(chats)]
    seeds = [
        (row, completion_seed(config.seed, "generate", number) + sample)
        for number, row in enumerate(rows)
        for sample in range(num_samples)
    ]
    sampling = Sampling.of(config.rollout, temperature=temperature)
    settings = (config.interaction, model, config.model, config.rollout)
    with player(*settings, completion=config.completion) as found:
        values = config.rollout.chat_template_kwargs
        tokenizer = load_tokenizer(model, config.model, values) if found is None else found.tokenizer
        policy = load_policy(model, config.model, device=pick_device(config.resources), token_seed=config.seed)
        engine = LocalEngine.of(policy, tokenizer, config.resources)
        if found is None:
            drawn = engine.generate([Request(prompt_ids(tokenizer, row.messages), seed) for row, seed in seeds], sampling)
        else:
            # The environment of a question is the same in all its samples.
            starts = [Start(row, seed, completion_seed(config.seed, "environment", row.prompt_id)) for row, seed in seeds]
            drawn = found.play(engine, starts, sampling)
    return [list(drawn[first : first + num_samples]) for first in range(0, len(drawn), num_samples)]
