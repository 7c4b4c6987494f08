"""Cuts the completions of a spec into shards, and puts the tables of the shards together in the order of the whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from grpo_tasks.cluster.parcel import INPUTS, MODULES, ParcelFile, config_at, file_at, model_at, model_files, module_files
from grpo_tasks.content.modules import own_sources
from grpo_tasks.rollout.spec import SampleSpec, chosen_rows
from schemas.config.operations import ClusterConfig
from schemas.prompts import GREEDY

PROMPTS = f"{INPUTS}/prompts.parquet"


@dataclass(frozen=True, slots=True)
class SampleParcel:
    """Completions to sample, ready to be sent."""

    spec: SampleSpec
    """As the driver has it."""
    files: tuple[ParcelFile, ...]
    """Prompts, model, and modules with tools or an environment."""

    @classmethod
    def of(cls, spec: SampleSpec) -> "SampleParcel":
        """List the inputs with their hashes."""
        own = own_sources(spec.interaction.own_code, spec.interaction.module_dirs())
        return cls(spec, (file_at(PROMPTS, spec.prompts), *model_files(spec.ref), *module_files(own)))

    def spec_at(self, root: Path, only: Sequence[str]) -> SampleSpec:
        """The specification of a shard with the paths of a node, where a process samples alone.

        Args:
            root: private directory on the node.
            only: ids of the prompts of the shard.
        """
        rollout = self.spec.rollout
        # A server of its own, on the cards that the process has.
        own = {"replicas": 1, "devices": [], "base_urls": [], "weights_urls": []}
        ref = model_at(self.spec.ref, self.files, root)
        update = {
            "model": config_at(self.spec.model, self.spec.ref, ref),
            "ref": ref,
            "prompts": root / PROMPTS,
            "only": list(only),
            "interaction": self.spec.interaction.model_copy(update={"module_dir": root / MODULES}),
            "rollout": rollout.model_copy(update={"vllm": rollout.vllm.model_copy(update=own)}),
            "resources": self.spec.resources.model_copy(update={"num_processes": 1, "cluster": ClusterConfig()}),
        }
        return self.spec.model_copy(update=update)


def shards(spec: SampleSpec, most: int) -> list[list[str]]:
    """The prompt ids of each shard: at most so many contiguous shards of nearly equal size, none of them empty."""
    ids = [row.prompt_id for row in chosen_rows(spec.prompts, spec.max_prompts, spec.only)]
    count = max(1, min(most, len(ids)))
    return [ids[len(ids) * index // count : len(ids) * (index + 1) // count] for index in range(count)]


def joined(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The tables of all shards, in order, as the table of one process: sampled completions first, then greedy ones."""
    # One chunk, so that the file has the same row groups too.
    whole = pl.concat(tables)
    return pl.concat([whole.filter(pl.col("sample") != GREEDY), whole.filter(pl.col("sample") == GREEDY)], rechunk=True)
