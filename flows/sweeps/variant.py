"""One run of a sweep, and what it is made of: hashed and copied when the sweep starts, compared when the run begins.

It is the pipeline up to the evaluation of the merged model, with the same steps and the same folders, so a step that another run
has finished is skipped. Nothing is published, because the best of many runs is partly luck: `grpo run` with its settings does.
"""

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import tags
from prefect.states import Completed

from flows.flow_run import inputs_key, open_flow_run
from flows.frozen_inputs import frozen_inputs
from flows.model_names import with_local_model
from flows.pipeline import train_and_evaluate
from flows.temporary_server import locked_flow
from grpo_tasks.evaluation.statistics import deciding_metric
from grpo_tasks.operating.automations import PRUNED
from grpo_tasks.processes.child import RESULT
from schemas.config.grid import Grid
from schemas.config.rollout import references_in
from schemas.errors import DamagedError, PrunedError, UserError
from schemas.results.sweep import VariantEnd, VariantSpec


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
    """Compare the files of a run, when it begins, with those that its sweep has hashed; `DamagedError` where they differ."""
    own = spec.config.model_dump(mode="json", include={"stages", "seed"})
    if _key(inputs_key(frozen_inputs(spec.config, folder=spec.copies)), [own["stages"], own["seed"]]) != spec.key:
        raise DamagedError(
            "the data or the base model have changed since this sweep started",
            place=f"run {spec.number} of the sweep",
            fix="start the sweep again: runs whose inputs are the same are skipped",
        )


def _key(inputs: str, own: object) -> str:
    return hashlib.sha256(json.dumps([inputs, own], sort_keys=True).encode()).hexdigest()


def run_variant(spec: VariantSpec) -> None:
    """Run the flow; what came of it is in the folder of the run."""
    with tags(f"sweep-{spec.sweep[:8]}"):
        # The name of the run is its place in the table of the sweep.
        variant_flow.with_options(flow_run_name=f"{spec.number}: {spec.label}")(spec)


@locked_flow(name="grpo-sweep-run", description="One run of a sweep: the pipeline up to the evaluation of the merged model.")
def variant_flow(spec: VariantSpec) -> Any:
    """Every step before publication. Ends in the state Pruned when the other runs of the sweep do better."""
    began, known = time.monotonic(), {"key": spec.key}

    def ended(**fields: Any) -> VariantEnd:
        end = VariantEnd.model_validate(known | {"seconds": time.monotonic() - began} | fields)
        end.save(spec.pruning.folder / RESULT)
        return end

    try:
        require_planned(spec)
        config = with_local_model(spec.config)
        with open_flow_run(config, flow=f"sweep {spec.sweep[:16]}", variant=spec, copies=spec.copies) as run:
            known |= {"run_id": run.tracked.run_id, "tracking_uri": run.tracked.store.uri, "flow_run_id": run.flow_run_id or ""}
            merged = train_and_evaluate(run).evaluations[-1]
    except PrunedError as error:
        end = ended(state="pruned", reason=f"{error.place}: {error.message.removeprefix('pruned ')}")
        return Completed(name=PRUNED, message=end.headline(), data=end)
    except UserError as error:
        ended(state="failed", reason=error.message.partition("\n")[0])
        raise
    return ended(state="finished", metric=deciding_metric(config.promotion, merged), figures=merged.metrics)
