"""One run of a sweep, in the process of process.py.

It is the pipeline up to the evaluation of the merged model, with the same steps and the same folders, so a step that another run
has finished is skipped. Nothing is published: a sweep looks at the held-out prompts many times, and the best of many runs is
partly luck. `grpo run` with the settings of the best one publishes it, and its tests decide.
"""

import time
from typing import Any

from prefect import tags
from prefect.states import Completed

from flows.flow_run import open_flow_run
from flows.model_names import with_local_model
from flows.pipeline import train_and_evaluate
from flows.sweeps.plans import require_planned
from flows.temporary_server import locked_flow
from grpo_tasks.evaluation.paired import deciding_metric
from grpo_tasks.operating.automations import PRUNED
from grpo_tasks.processes.child import RESULT
from schemas.errors import PrunedError, UserError
from schemas.results.sweep import VariantEnd, VariantSpec


def run_variant(spec: VariantSpec) -> None:
    """Run the flow; what came of it is in the folder of the run."""
    with tags(f"sweep-{spec.sweep[:8]}"):
        # The name of the run is its place in the table of the sweep.
        variant_flow.with_options(flow_run_name=f"{spec.number}: {spec.label}")(spec)


@locked_flow(name="grpo-sweep-run", description="One run of a sweep: the pipeline up to the evaluation of the merged model.")
def variant_flow(spec: VariantSpec) -> Any:
    """Every step before publication. Ends in the state Pruned when the other runs of the sweep do better.

    Args:
        spec: the run.
    """
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
