"""What each run of a sweep is made of: hashed and copied when the sweep starts, compared when the run begins."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from flows.flow_run import inputs_key
from flows.frozen_inputs import frozen_inputs
from grpo_tasks.sweeping.grid import Grid
from schemas.config.rollout import references_in
from schemas.errors import DamagedError
from schemas.results.sweep import VariantSpec


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run of a sweep is made of."""

    key: str
    """Content key of the run."""
    copies: Path
    """The user's own modules."""


def plans_of(grid: Grid) -> dict[int, Plan]:
    """What each run is made of. Data, model and modules are hashed and copied once for all runs that share them."""
    shared: dict[str, tuple[str, Path]] = {}
    plans = {}
    for variant in grid.variants:
        tree = variant.config.model_dump(mode="json", exclude={"tracking", "resources"})
        own = [tree.pop("stages"), tree.pop("seed")]
        # The modules that stages name are copied too.
        text = json.dumps([tree, sorted(references_in(own))], sort_keys=True)
        if text not in shared:
            inputs = frozen_inputs(variant.config)
            shared[text] = inputs_key(inputs), inputs.copies.folder
        plans[variant.number] = Plan(_key(shared[text][0], own), shared[text][1])
    return plans


def require_planned(spec: VariantSpec) -> None:
    """Compare the files of a run, when it begins, with those that its sweep has hashed.

    Raises:
        DamagedError: data or the base model have changed.
    """
    own = spec.config.model_dump(mode="json", include={"stages", "seed"})
    if _key(inputs_key(frozen_inputs(spec.config, folder=spec.copies)), [own["stages"], own["seed"]]) != spec.key:
        raise DamagedError(
            "the data or the base model have changed since this sweep started",
            place=f"run {spec.number} of the sweep",
            fix="start the sweep again: runs whose inputs are the same are skipped",
        )


def _key(inputs: str, own: object) -> str:
    return hashlib.sha256(json.dumps([inputs, own], sort_keys=True).encode()).hexdigest()
