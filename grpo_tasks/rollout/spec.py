"""Which completions to sample, and for which rows. Imports no torch, so the step that writes the spec stays light."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from grpo_tasks.data.table import read_prompts
from grpo_tasks.processes.child import SPEC, run_module
from schemas.config.completion import CompletionConfig
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import InteractionConfig, RolloutConfig
from schemas.config.run import RunConfig
from schemas.prompts import PromptRow
from schemas.results.base import Result
from schemas.results.model import ModelRef

SAMPLES = "samples.parquet"
"""The table that the process leaves."""
CLUSTER = "grpo_tasks.cluster.sampling"
"""Package that samples on the nodes of a cluster. Named, not imported, as in grpo_tasks/stage/run.py."""


class SampleSpec(Result):
    """The completions to sample; a step writes it as spec.json for the process that samples."""

    model: ModelConfig
    ref: ModelRef
    prompts: Path
    """Accepted rows (schemas/tables.py Prompts)."""
    max_prompts: int | None
    """Largest number of rows. Those with the smallest prompt ids are taken; ids are hashes, so this is a fixed random choice.
    None takes all."""
    num_samples: int
    """Samples per row."""
    first_sample: int = 0
    """Number of the first sample. Seeds follow the number, so samples 2 to 7 are the same alone and with samples 0 and 1."""
    only: list[str] | None = None
    """Ids of the rows to sample for; None takes all."""
    temperature: float
    greedy: bool
    """Add one greedy completion per row."""
    rollout: RolloutConfig
    resources: ResourcesConfig
    seed: int
    interaction: InteractionConfig = Field(default_factory=InteractionConfig)
    """Tools and environments that answer the policy."""
    completion: CompletionConfig = Field(default_factory=CompletionConfig)
    """What a completion looks like; its reasoning holds no calls."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        ref: ModelRef,
        prompts: Path,
        resources: ResourcesConfig,
        *,
        num_samples: int,
        max_prompts: int | None = None,
        temperature: float | None = None,
        greedy: bool = False,
    ) -> "SampleSpec":
        """Completions by the settings of a config; without a temperature of their own they are sampled as in training."""
        return cls(
            model=config.model,
            ref=ref,
            prompts=prompts,
            max_prompts=max_prompts,
            num_samples=num_samples,
            temperature=config.rollout.temperature if temperature is None else temperature,
            greedy=greedy,
            rollout=config.rollout,
            resources=resources,
            seed=config.seed,
            interaction=config.interaction,
            completion=config.completion,
        )

    @classmethod
    def of_evaluation(cls, config: RunConfig, ref: ModelRef, prompts: Path, resources: ResourcesConfig) -> "SampleSpec":
        """The completions of an evaluation."""
        given = config.evaluation
        return cls.of(
            config,
            ref,
            prompts,
            resources,
            num_samples=given.num_samples,
            max_prompts=given.max_prompts,
            temperature=given.temperature,
            greedy=given.greedy,
        )

    def part(self, only: Sequence[str] | None, numbers: range) -> "SampleSpec":
        """The same with these sample numbers, for the rows with these ids or for all."""
        update = {"only": None if only is None else list(only), "first_sample": numbers.start, "num_samples": len(numbers)}
        return self.model_copy(update=update)


def run_sampling(spec: SampleSpec, directory: Path) -> None:
    """Sample in a child process, on this machine or on a cluster, into `directory`/samples.parquet; both give the same rows.

    UserError where the model cannot be loaded, a server fails, or the cluster cannot be used.
    """
    spec.save(directory / SPEC)
    # Servers that run somewhere already answer this machine as well as any node.
    served = spec.rollout.engine == "vllm" and spec.rollout.vllm.base_urls and spec.ref.path == spec.model.path
    on_cluster = spec.resources.cluster.engine == "ray" and not served
    run_module(CLUSTER if on_cluster else "grpo_tasks.rollout", directory)


def chosen_rows(prompts: Path, limit: int | None, only: Sequence[str] | None = None) -> list[PromptRow]:
    """The rows to sample for, sorted by prompt id, so that they do not depend on the order of the file."""
    wanted = None if only is None else set(only)
    rows = sorted(read_prompts(prompts), key=lambda row: row.prompt_id)[:limit]
    return [row for row in rows if wanted is None or row.prompt_id in wanted]
