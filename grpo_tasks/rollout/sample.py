"""Completions of one model for a list of prompts, as a table: what the lab and the evaluation look at."""

from collections.abc import Sequence

import polars as pl

from grpo_tasks.data.table import PromptRow
from grpo_tasks.policy.chat import prompt_ids
from grpo_tasks.policy.load import load_policy, load_tokenizer, pick_device
from grpo_tasks.rollout.engine import Completion, Request, Sampling, completion_seed
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.spec import GREEDY, SampleSpec, chosen_rows


def sample(spec: SampleSpec) -> pl.DataFrame:
    """Sample as the spec says; columns of schemas/tables.py Samples and `token_ids`."""
    rows = chosen_rows(spec.prompts, spec.max_prompts)
    device = pick_device(spec.resources)
    tokenizer = load_tokenizer(spec.ref)
    engine = LocalEngine(load_policy(spec.ref, spec.model, device=device), tokenizer)
    prompts = [prompt_ids(tokenizer, row.messages) for row in rows]
    samples = range(spec.num_samples)
    requests = [
        Request(ids, completion_seed(spec.seed, "sample", row.prompt_id, index))
        for row, ids in zip(rows, prompts, strict=True)
        for index in samples
    ]
    drawn = engine.generate(requests, Sampling.of(spec.rollout, temperature=spec.temperature))
    table = _table([row for row in rows for _ in samples], list(samples) * len(rows), drawn)
    if not spec.greedy:
        return table
    likeliest = engine.generate([Request(ids, 0) for ids in prompts], Sampling.of(spec.rollout, temperature=0.0))
    return pl.concat([table, _table(rows, [GREEDY] * len(rows), likeliest)])


def _table(of: Sequence[PromptRow], samples: Sequence[int], drawn: Sequence[Completion]) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "prompt_id": [row.prompt_id for row in of],
            "sample": list(samples),
            "completion": [completion.text for completion in drawn],
            "completion_tokens": [len(completion.token_ids) for completion in drawn],
            "finish_reason": [completion.finish_reason for completion in drawn],
            "token_ids": [completion.token_ids for completion in drawn],
        },
        schema_overrides={"sample": pl.Int64, "completion_tokens": pl.Int64, "token_ids": pl.List(pl.Int64)},
    )
