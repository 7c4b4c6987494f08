"""Sample completions of one model for a list of prompts into a table, for the reward lab and the evaluation."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import polars as pl
from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.model_files import generation_eos
from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.policy.load import adds_tokens, load_policy, load_tokenizer, loading_dtype, pick_device, save_plain
from grpo_tasks.rollout.conversations import Player, Start, player
from grpo_tasks.rollout.engine import Completion, Request, RolloutEngine, Sampling, completion_seed, conversation_column
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.spec import SampleSpec, chosen_rows
from grpo_tasks.rollout.vllm_engine import VllmSampler
from grpo_tasks.rollout.vllm_server import ServerModel, model_servers
from schemas.paths import resolve
from schemas.prompts import GREEDY, PromptRow


def sample_table(spec: SampleSpec, directory: Path) -> pl.DataFrame:
    """The columns of schemas/tables.py Samples and `token_ids`; `directory` gets the logs of rollout servers."""
    log = directory / "environments.log"
    rows = chosen_rows(spec.prompts, spec.max_prompts, spec.only)
    samples = range(spec.first_sample, spec.first_sample + spec.num_samples)
    # Consecutive seeds for the samples of a prompt; see Request.
    seeds = [(row, completion_seed(spec.seed, "sample", row.prompt_id) + index) for row in rows for index in samples]
    with player(spec.interaction, spec.ref, spec.model, spec.rollout, completion=spec.completion, log=log) as found:
        values = spec.rollout.chat_template_kwargs
        tokenizer = load_tokenizer(spec.ref, spec.model, values) if found is None else found.tokenizer
        with _engine(spec, tokenizer, directory) as engine:
            draw = partial(sample_rows, engine, tokenizer, found, seed=spec.seed)
            drawn = draw(seeds, Sampling.of(spec.rollout, temperature=spec.temperature))
            table = _table([row for row, _ in seeds], list(samples) * len(rows), drawn)
            if not spec.greedy:
                return table
            greedy = draw([(row, 0) for row in rows], Sampling.of(spec.rollout, temperature=0.0))
            return pl.concat([table, _table(rows, [GREEDY] * len(rows), greedy)])


def sample_rows(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    player: Player | None,
    seeds: Sequence[tuple[PromptRow, int]],
    sampling: Sampling,
    *,
    seed: int,
) -> list[Completion]:
    """A completion for each row and seed, or a conversation where there is a player; `seed` is that of the run."""
    if player is None:
        ids = {row.prompt_id: prompt_ids(tokenizer, row.messages) for row, _ in seeds}
        return engine.generate([Request(ids[row.prompt_id], own) for row, own in seeds], sampling)
    # The environment of a prompt is the same in all its samples, and in those of other models.
    starts = [Start(row, own, completion_seed(seed, "environment", row.prompt_id)) for row, own in seeds]
    return player.play(engine, starts, sampling)


@contextmanager
def _engine(spec: SampleSpec, tokenizer: PreTrainedTokenizerBase, directory: Path) -> Iterator[RolloutEngine]:
    ref, model, config = spec.ref, spec.model, spec.rollout.vllm
    device, adapter, write = pick_device(spec.resources), ref.adapter, None
    if spec.rollout.engine == "local":
        yield LocalEngine.of(load_policy(ref, model, device=device, token_seed=spec.seed), tokenizer, spec.resources)
        return
    if adds_tokens(ref, model):
        # No adapter on vLLM can carry the rows of added tokens: the server gets all weights, merged.
        adapter, write = None, partial(save_plain, ref, model, tokenizer, token_seed=spec.seed)
    rank = None if adapter is None else int(json.loads((adapter / "adapter_config.json").read_bytes())["r"])
    served = ServerModel(Path(resolve(ref.path)), loading_dtype(ref, model), rank, device.type == "cuda")
    running = bool(config.base_urls) and ref.path == model.path
    with model_servers(config, served, directory, running=running, write=write) as servers:
        eos = generation_eos(resolve(ref.path), ref.revision)
        awake = config.model_copy(update={"sleep": False})
        sampler = VllmSampler(tokenizer, eos, awake, servers, adapter, scratch=directory / "served-adapter")
        try:
            sampler.sync()
            yield sampler
        finally:
            sampler.close()


def _table(rows: Sequence[PromptRow], samples: Sequence[int], drawn: Sequence[Completion]) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "prompt_id": [row.prompt_id for row in rows],
            "sample": list(samples),
            "completion": [completion.text for completion in drawn],
            "completion_tokens": [completion.num_written for completion in drawn],
            "finish_reason": [completion.finish_reason for completion in drawn],
            "token_ids": [completion.token_ids for completion in drawn],
            **conversation_column(drawn),
        },
        schema_overrides={"sample": pl.Int64, "completion_tokens": pl.Int64, "token_ids": pl.List(pl.Int64)},
    )
