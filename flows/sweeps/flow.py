"""A sweep as a flow: one run for each combination of values and each seed, pruned by held-out reward."""

import hashlib
from dataclasses import replace

from prefect.client.orchestration import get_client

from flows.flow_run import state_in_prefect
from flows.model_names import with_fixed_date, with_pinned_model
from flows.preflight import check_inputs, check_installed, check_output, check_working_directory
from flows.sweeps.plans import plans_of
from flows.sweeps.supervise import Options, SweepSupervisor
from flows.temporary_server import locked_flow
from grpo_tasks.kit.lock import alone
from grpo_tasks.running.orchestrator import Wait, flow_run_id, flow_run_name, flow_run_url
from grpo_tasks.sweeping.grid import Grid, make_grid
from grpo_tasks.tracking.shown.sweep import SweepRun
from schemas.config.model import ModelConfig
from schemas.config.run import RunConfig
from schemas.errors import hidden_errors
from schemas.results.sweep import SweepResult

SWEEPS = "sweeps"
"""Folder of a config's runs with a folder for each sweep."""


@locked_flow(name="grpo-sweep", description="Many runs with different settings, compared on the held-out prompts.")
def sweep_flow(
    source: str = "demo",
    over: list[str] | None = None,
    seeds: int = 1,
    overrides: list[str] | None = None,
    parallel: int = 1,
    prune: bool = True,
    min_siblings: int = 2,
) -> SweepResult:
    """Train every combination of the values of some settings, and compare them. A run that lags behind is pruned.

    Args:
        source: name of a preset, or a YAML file in the folder where `grpo up` was called.
        over: settings to vary, each as key.path=value,value, for example stages.0.learning_rate=1e-5,5e-6.
        seeds: number of seeds for each combination.
        overrides: settings of every run, each as key.path=value.
        parallel: how many runs train at the same time. On GPUs each stage waits for its slot.
        prune: end a run early when its held-out reward lags behind the median of the others.
        min_siblings: fewest other runs to compare with before a run is pruned.
    """
    check_working_directory()
    grid = make_grid(source, overrides or [], over or [], seeds=seeds)
    check_grid(grid)
    return run_sweep(grid, Options(max(1, parallel), prune, max(1, min_siblings)))


def check_grid(grid: Grid) -> None:
    """Refuse inputs that do not exist and libraries that are not installed, for every run.

    Raises:
        ConfigError: with the field.
    """
    for variant in grid.variants:
        check_inputs(variant.config)
        check_installed(variant.config)


def run_sweep(grid: Grid, options: Options) -> SweepResult:
    """Run a sweep in the flow run of the caller; the same sweep again continues where it was interrupted."""
    check_output(grid.base)
    grid = pinned(grid)
    plans = plans_of(grid)
    key = hashlib.sha256("\n".join(plan.key for _, plan in sorted(plans.items())).encode()).hexdigest()
    output = grid.base.resources.output_dir / grid.base.name
    folder, run_id, wait = output / SWEEPS / key[:16], flow_run_id(), Wait()

    def waiting(holder: str) -> None:
        wait.begin(f"waiting for {holder}, which runs the same sweep {folder}")

    with (
        hidden_errors(),
        alone(folder / ".lock", who=f"the run {flow_run_name() or grid.base.name}", waiting=waiting),
        state_in_prefect(output / ".running", run_id),
    ):
        wait.over()
        known = {"prefect.flow_run_id": run_id, "prefect.flow_run_url": flow_run_url()}
        tracked = SweepRun(grid, key=key, flow={name: value for name, value in known.items() if value})
        return _supervised(SweepSupervisor(grid, key, folder, tracked, options, _prefect_api(), plans))


def pinned(grid: Grid) -> Grid:
    """The grid with the version behind each alias that a run starts from: another version behind it makes other runs."""
    found: dict[str, ModelConfig] = {}

    def pin(config: RunConfig) -> RunConfig:
        path = config.model.path
        if path not in found:
            found[path] = with_pinned_model(config).model
        return with_fixed_date(config.model_copy(update={"model": config.model.model_copy(update={"path": found[path].path})}))

    return replace(grid, variants=tuple(replace(variant, config=pin(variant.config)) for variant in grid.variants))


def _supervised(supervisor: SweepSupervisor) -> SweepResult:
    try:
        result = supervisor.run()
    except BaseException as fault:
        supervisor.tracked.end("FAILED" if isinstance(fault, Exception) else "KILLED")
        raise
    if result.computed:
        supervisor.tracked.show(result)
    supervisor.tracked.end("FINISHED")
    return result


def _prefect_api() -> str:
    """Address of this run's Prefect server; a temporary one is known to this process only."""
    with get_client(sync_client=True) as client:
        return str(client.api_url).rstrip("/")
