"""Which completions to sample, and for which rows. Imports no torch, so the step that writes the spec stays light."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    max_prompts: int | None = None
    """Largest number of rows. Those with the smallest prompt ids are taken; ids are hashes, so this is a fixed random choice.
    None takes all."""
    num_samples: int
    first_sample: int = 0
    """Number of the first sample. Seeds follow the number, so samples 2 to 7 are the same alone and with samples 0 and 1."""
    only: list[str] | None = None
    """Ids of the rows to sample for; None takes all."""
    temperature: float | None = None
    """None: as in training."""
    greedy: bool = False
    """Add one greedy completion per row."""
    rollout: RolloutConfig
    resources: ResourcesConfig
    seed: int
    interaction: InteractionConfig = Field(default_factory=InteractionConfig)
    completion: CompletionConfig = Field(default_factory=CompletionConfig)

    @classmethod
    def of(cls, config: RunConfig, ref: ModelRef, prompts: Path, resources: ResourcesConfig, **fields: Any) -> "SampleSpec":
        """The sections of a config as they are; `fields` are the numbers of rows and samples, temperature and greedy."""
        sections = {name: getattr(config, name) for name in ("model", "rollout", "interaction", "completion", "seed")}
        return cls(ref=ref, prompts=prompts, resources=resources, **sections, **fields)

    @classmethod
    def of_evaluation(cls, config: RunConfig, ref: ModelRef, prompts: Path, resources: ResourcesConfig) -> "SampleSpec":
        """The completions of an evaluation."""
        fields = {name: getattr(config.evaluation, name) for name in ("num_samples", "max_prompts", "temperature", "greedy")}
        return cls.of(config, ref, prompts, resources, **fields)

    def part(self, only: Sequence[str] | None, numbers: range) -> "SampleSpec":
        """The same with these sample numbers, for the rows with these ids or for all."""
        update = {"only": None if only is None else list(only), "first_sample": numbers.start, "num_samples": len(numbers)}
        return self.model_copy(update=update)


def run_sampling(spec: SampleSpec, directory: Path) -> None:
    """Sample in a child process, here or on a cluster, into `directory`/samples.parquet: the same rows; `UserError` if not."""
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
