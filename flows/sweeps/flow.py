"""A sweep as a flow: one run for each combination of values and each seed, pruned by held-out reward."""

import hashlib
import os
import shlex
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import get_client

from flows.flow_run import mlflow_pages, state_in_prefect
from flows.model_names import with_fixed_date, with_pinned_model
from flows.preflight import check_inputs, check_installed, check_output, check_working_directory
from flows.sweeps.process import MODULE
from flows.sweeps.variant import Plan, plans_of
from flows.temporary_server import locked_flow
from grpo_tasks.processes.child import ERROR, POLL_S, RESULT, SPEC, Child, error_of
from grpo_tasks.running.orchestrator import flow_run_id, flow_run_url, locked, run_logger, show_artifact
from grpo_tasks.tracking.sweep import SweepRun, cells, compare_link, markdown
from schemas.config.grid import Grid, Variant, make_grid
from schemas.config.model import ModelConfig
from schemas.config.run import RunConfig
from schemas.errors import DiskFullError, OrchestratorError, TrackingError, UserError, hidden_errors
from schemas.results.sweep import Pruning, SweepLine, SweepResult, VariantEnd, VariantSpec
from schemas.secret import hide

RUNS = "runs"
"""Folder of a sweep with a folder for each of its runs."""
STOPS_ALL = (DiskFullError, TrackingError, OrchestratorError)
"""Errors that every other run would meet too."""

SWEEPS = "sweeps"
"""Folder of a config's runs with a folder for each sweep."""


@dataclass(slots=True)
class SweepSupervisor:
    """The runs of one sweep."""

    grid: Grid
    key: str
    folder: Path
    tracked: SweepRun
    plans: Mapping[int, Plan]
    """What each run is made of, by its number."""
    prefect_api: str
    """Address of this run's Prefect server; a temporary one is known to this process only."""
    parallel: int
    prune: bool
    min_siblings: int
    ends: dict[int, VariantEnd] = field(default_factory=dict)
    errors: list[UserError] = field(default_factory=list)
    _progress: dict[str, UUID] = field(default_factory=dict)

    def run(self) -> SweepResult:
        """Run what has not ended before; raises an error that every run would meet, or the first one's when every run failed."""
        waiting = deque(variant for variant in self.grid.variants if not self._ended_before(variant))
        started = len(waiting)
        if self.tracked.is_new or started:
            self._show()
        running: dict[int, Child] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.parallel:
                    variant = waiting.popleft()
                    running[variant.number] = self._start(variant)
                for number, child in list(running.items()):
                    if not child.is_running(POLL_S):
                        del running[number]
                        self._end(number, child.exit_code)
        finally:
            for child in running.values():
                child.end()
        if self.errors and all(end.state == "failed" for end in self.ends.values()):
            raise self.errors[0]
        return self.result(computed=started)

    def result(self, computed: int = 0) -> SweepResult:
        """The table as it is now."""
        handle = self.tracked.handle
        lines = [
            SweepLine(
                number=one.number, label=one.label, settings=one.settings, seed=one.config.seed, end=self.ends.get(one.number)
            )
            for one in self.grid.variants
        ]
        known = SweepResult(
            lines=lines,
            run_id=handle.run_id,
            experiment_id=handle.experiment_id,
            tracking_uri=handle.store.uri,
            computed=computed,
        )
        highest = known.highest
        if highest is None:
            return known
        sets = [part for text in self.grid.settings_of(highest.number) for part in ("--set", text)]
        return known.model_copy(update={"publish": hide(shlex.join(["grpo", "run", self.grid.source, *sets]))})

    def _ended_before(self, variant: Variant) -> bool:
        """Whether a run needs no process. A store that does not know the sweep gets all runs again, from finished steps."""
        with suppress(OSError, ValueError):
            end = VariantEnd.load(self._folder(variant.number) / RESULT)
            resumes = end.state == "failed" or (end.state == "pruned" and not self.prune)
            if end.key == self.plans[variant.number].key and not self.tracked.is_new and not resumes:
                self.ends[variant.number] = end
                return True
        return False

    def _start(self, variant: Variant) -> Child:
        folder = self._folder(variant.number)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (RESULT, ERROR):
            (folder / name).unlink(missing_ok=True)
        pruning = Pruning(
            folder=folder.resolve(),
            family=variant.family,
            min_siblings=self.min_siblings if self.prune else None,
            same_seed=len(self.grid.variants) // self.grid.seeds > self.min_siblings,
        )
        config, resources = variant.config, variant.config.resources
        if self.parallel > 1 and resources.num_threads is None:
            # Runs that share the processor get a part of its cores each.
            threads = max(1, (os.cpu_count() or 1) // self.parallel)
            config = config.model_copy(update={"resources": resources.model_copy(update={"num_threads": threads})})
        spec = VariantSpec(
            number=variant.number,
            label=variant.label,
            key=self.plans[variant.number].key,
            copies=self.plans[variant.number].copies,
            config=config,
            sweep=self.key,
            parent_run_id=self.tracked.handle.run_id,
            pruning=pruning,
            prefect_api=self.prefect_api,
        )
        spec.save(folder / SPEC)
        run_logger().info("run %d of %d begins: %s", variant.number, len(self.grid.variants), variant.label)
        return Child(MODULE, folder)

    def _end(self, number: int, exit_code: int) -> None:
        folder = self._folder(number)
        error = None if exit_code == 0 else error_of(exit_code, MODULE, folder)
        try:
            end = VariantEnd.load(folder / RESULT)
        except (OSError, ValueError):
            # The process was killed, or failed before its run was opened.
            reason = error.message.partition("\n")[0] if error is not None else "its process left no result"
            end = VariantEnd(key=self.plans[number].key, state="failed", reason=reason, seconds=0.0)
        if isinstance(error, STOPS_ALL):
            raise error
        if error is not None:
            self.errors.append(error)
        self.ends[number] = end
        variants = self.grid.variants
        said = f"run {number} of {len(variants)} ended: {variants[number - 1].label}: {end.headline()}"
        run_logger().info("%s (%.0f s, log %s)", said, end.seconds, folder / "log.txt")
        self._show(number)

    def _show(self, ended: int | None = None) -> None:
        """Bring MLflow and Prefect up to date."""
        result = self.result()
        if ended is not None:
            self.tracked.mark(result.lines[ended - 1])
        self.tracked.show(result)
        show_artifact("sweep", cells(result), result.headline())
        done = 100 * len(self.ends) / len(self.grid.variants)
        show_artifact("sweep-progress", done, f"{len(self.ends)} of {len(self.grid.variants)} runs ended", self._progress)
        if pages := mlflow_pages(result.tracking_uri):
            runs = [line.end.run_id for line in result.lines if line.end is not None and line.end.run_id]
            link = compare_link(runs, result.experiment_id)
            compare = f"\n\n[compare the runs in MLflow]({pages}/{link})" if link else ""
            page = f"{pages}/#/experiments/{result.experiment_id}/runs/{result.run_id}"
            text = f"# {result.headline()}\n\n[the sweep in MLflow]({page}){compare}\n\n{markdown(result)}"
            show_artifact("sweep-links", hide(text), "This sweep in MLflow")

    def _folder(self, number: int) -> Path:
        return self.folder / RUNS / f"{number:03d}"


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
    for variant in grid.variants:
        check_inputs(variant.config)
        check_installed(variant.config)
    check_output(grid.base)
    grid = pinned(grid)
    plans = plans_of(grid)
    key = hashlib.sha256("\n".join(plan.key for _, plan in sorted(plans.items())).encode()).hexdigest()
    output = grid.base.resources.output_dir / grid.base.name
    folder, run_id = output / SWEEPS / key[:16], flow_run_id()
    with (
        hidden_errors(),
        locked(folder / ".lock", f"runs the same sweep {folder}", who=f"the run {grid.base.name}"),
        state_in_prefect(output / ".running", run_id),
    ):
        known = {"prefect.flow_run_id": run_id, "prefect.flow_run_url": flow_run_url()}
        tracked = SweepRun(grid, key=key, flow={name: value for name, value in known.items() if value})
        with get_client(sync_client=True) as client:
            api = str(client.api_url).rstrip("/")
        supervisor = SweepSupervisor(grid, key, folder, tracked, plans, api, max(1, parallel), prune, max(1, min_siblings))
        try:
            result = supervisor.run()
        except BaseException as fault:
            tracked.handle.end("FAILED" if isinstance(fault, Exception) else "KILLED")
            raise
        if result.computed:
            tracked.show(result)
        tracked.handle.end("FINISHED")
        return result


def pinned(grid: Grid) -> Grid:
    """The grid with the version behind each alias that a run starts from: another version behind it makes other runs."""
    found: dict[str, ModelConfig] = {}

    def pin(config: RunConfig) -> RunConfig:
        path = config.model.path
        if path not in found:
            found[path] = with_pinned_model(config).model
        return with_fixed_date(config.model_copy(update={"model": config.model.model_copy(update={"path": found[path].path})}))

    return replace(grid, variants=tuple(replace(variant, config=pin(variant.config)) for variant in grid.variants))
