"""Sample completions of one model for a list of prompts into a table, for the reward lab and the evaluation."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import polars as pl
from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.chat import generation_eos
from grpo_tasks.policy.chat import prompt_ids
from grpo_tasks.policy.load import adds_tokens, load_policy, load_tokenizer, loading_dtype, pick_device, save_plain
from grpo_tasks.rollout.conversations.play import Player, Start
from grpo_tasks.rollout.conversations.player import player
from grpo_tasks.rollout.engine import Completion, Request, RolloutEngine, Sampling, completion_seed, conversation_column
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.spec import SampleSpec, chosen_rows
from grpo_tasks.rollout.vllm_engine import VllmSampler
from grpo_tasks.rollout.vllm_server import ServerModel, VllmServer, existing_servers, serving
from schemas.paths import resolve
from schemas.prompts import GREEDY, PromptRow
from schemas.results.model import ModelRef


def sample_table(spec: SampleSpec, directory: Path) -> pl.DataFrame:
    """Sample as the spec says.

    Args:
        spec: model, prompts and sampling.
        directory: receives the logs of rollout servers.

    Returns:
        The columns of schemas/tables.py Samples and `token_ids`.

    Raises:
        ModelError: the model cannot be loaded.
        RolloutError: a server fails.
    """
    log = directory / "environments.log"
    with player(spec.interaction, spec.ref, spec.model, spec.rollout, completion=spec.completion, log=log) as found:
        values = spec.rollout.chat_template_kwargs
        tokenizer = load_tokenizer(spec.ref, spec.model, values) if found is None else found.tokenizer
        with _engine(spec, tokenizer, directory) as engine:
            return _sampled(spec, tokenizer, engine, found)


@contextmanager
def _engine(spec: SampleSpec, tokenizer: PreTrainedTokenizerBase, directory: Path) -> Iterator[RolloutEngine]:
    device, config, adapter = pick_device(spec.resources), spec.rollout.vllm, spec.ref.adapter
    if spec.rollout.engine == "local":
        yield LocalEngine.of(load_policy(spec.ref, spec.model, device=device, token_seed=spec.seed), tokenizer, spec.resources)
    elif adds_tokens(spec.ref, spec.model):
        with _widened(spec, tokenizer, directory) as sampler:
            yield sampler
    elif config.base_urls and spec.ref.path == spec.model.path:
        with _sampler(spec, tokenizer, existing_servers(config, adapters=adapter is not None), directory) as sampler:
            yield sampler
    else:
        rank = None if adapter is None else int(json.loads((adapter / "adapter_config.json").read_bytes())["r"])
        served = ServerModel(Path(resolve(spec.ref.path)), loading_dtype(spec.ref, spec.model), rank, device.type == "cuda")
        with serving(config, served, directory) as servers, _sampler(spec, tokenizer, servers, directory) as sampler:
            yield sampler


@contextmanager
def _widened(spec: SampleSpec, tokenizer: PreTrainedTokenizerBase, directory: Path) -> Iterator[RolloutEngine]:
    """A server for a model with added tokens, whose rows no adapter on vLLM can carry: it gets all weights, merged."""
    folder, cuda = directory / "served", pick_device(spec.resources).type == "cuda"
    save_plain(spec.ref, spec.model, tokenizer, folder, token_seed=spec.seed)
    served = ServerModel(folder, loading_dtype(spec.ref, spec.model), None, cuda)
    merged = spec.model_copy(update={"ref": ModelRef(path=str(folder))})
    try:
        with (
            serving(spec.rollout.vllm, served, directory) as servers,
            _sampler(merged, tokenizer, servers, directory) as sampler,
        ):
            yield sampler
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _sampler(
    spec: SampleSpec, tokenizer: PreTrainedTokenizerBase, servers: Sequence[VllmServer], directory: Path
) -> Iterator[RolloutEngine]:
    eos = generation_eos(resolve(spec.ref.path), spec.ref.revision)
    config = spec.rollout.vllm.model_copy(update={"sleep": False})
    sampler = VllmSampler(tokenizer, eos, config, servers, spec.ref.adapter, scratch=directory / "served-adapter")
    try:
        sampler.sync()
        yield sampler
    finally:
        sampler.close()


def _sampled(
    spec: SampleSpec, tokenizer: PreTrainedTokenizerBase, engine: RolloutEngine, player: Player | None = None
) -> pl.DataFrame:
    rows = chosen_rows(spec.prompts, spec.max_prompts, spec.only)
    samples = range(spec.first_sample, spec.first_sample + spec.num_samples)

    def draw(seeds: Sequence[tuple[PromptRow, int]], sampling: Sampling) -> list[Completion]:
        if player is None:
            ids = {row.prompt_id: prompt_ids(tokenizer, row.messages) for row in rows}
            return engine.generate([Request(ids[row.prompt_id], seed) for row, seed in seeds], sampling)
        # The environment of a prompt is the same in all its samples, and in those of other models.
        starts = [Start(row, seed, completion_seed(spec.seed, "environment", row.prompt_id)) for row, seed in seeds]
        return player.play(engine, starts, sampling)

    # Consecutive seeds for the samples of a prompt; see Request.
    seeds = [(row, completion_seed(spec.seed, "sample", row.prompt_id) + index) for row in rows for index in samples]
    drawn = draw(seeds, Sampling.of(spec.rollout, temperature=spec.temperature))
    table = _table([row for row in rows for _ in samples], list(samples) * len(rows), drawn)
    if not spec.greedy:
        return table
    greedy = draw([(row, 0) for row in rows], Sampling.of(spec.rollout, temperature=0.0))
    return pl.concat([table, _table(rows, [GREEDY] * len(rows), greedy)])


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
