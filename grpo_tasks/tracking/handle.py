"""One MLflow run, written to only by calls that may be repeated.

    once(marker, work)   ->  skipped when the marker is set; otherwise wake, work, set the marker last

A run that is only looked at stays as it is: its status changes with the first thing written (`wake`). Killed between work and
marker, the work is done again, so each piece of it overwrites or is the same: metrics carry the time of their result, not of the
shipping; files are replaced; tables are written only where there is none.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import polars as pl
from mlflow.entities import Metric, Param, Run, RunTag

from grpo_tasks.tracking.store import Store

MARKER = "grpo.recorded."
_PARAMS_PER_CALL = 100
_METRICS_PER_CALL = 1_000
_BYTES_PER_CALL = 500_000
_SHOWN_CHARS = 2_000

EndStatus = Literal["FINISHED", "FAILED", "KILLED"]


class RunHandle:
    """A parent or child run. `on_wake` is called once, before the first thing is written."""

    def __init__(self, store: Store, run: Run, *, on_wake: Callable[["RunHandle"], None] | None = None) -> None:
        self.store = store
        self.run_id: str = run.info.run_id
        self.experiment_id: str = run.info.experiment_id
        self.status: str = run.info.status
        self.started_ms: int = run.info.start_time
        self._params = dict(run.data.params)
        self._markers = {tag for tag in run.data.tags if tag.startswith(MARKER)}
        self._on_wake = on_wake
        self._awake = False

    @property
    def awake(self) -> bool:
        """Whether anything was written through this handle."""
        return self._awake

    def wake(self) -> None:
        """Say that the run is being worked on; done by everything that writes."""
        if self._awake:
            return
        self._awake = True
        if self.status != "RUNNING":
            self.store.ask(lambda client: client.update_run(self.run_id, status="RUNNING"))
            self.status = "RUNNING"
        if self._on_wake:
            self._on_wake(self)

    def end(self, status: EndStatus) -> None:
        """Set the final status, unless the run has it already and nothing was written."""
        if not self._awake and self.status == status:
            return
        self.store.ask(lambda client: client.set_terminated(self.run_id, status=status))
        self.status = status
        self._awake = False

    def has(self, marker: str) -> bool:
        """Whether the piece of work was recorded completely."""
        return MARKER + marker in self._markers

    def once(self, marker: str, work: Callable[[], None]) -> bool:
        """Do a repeatable piece of work unless it is done; True when it was done now."""
        if self.has(marker):
            return False
        # Two processes at one run: a table that both find missing would be written twice. One lock in sixteen, not a file a run.
        with self.store.alone(f"record-{self.run_id[:1]}", who=f"a process that records the run {self.run_id}"):
            self._markers |= self._recorded()
            if self.has(marker):
                return False
            self.wake()
            work()
            self.tags({MARKER + marker: "true"})
        self._markers.add(MARKER + marker)
        return True

    def _recorded(self) -> set[str]:
        """Markers of the run as the store has them now."""
        tags = self.store.ask(lambda client: client.get_run(self.run_id)).data.tags
        return {tag for tag in tags if tag.startswith(MARKER)}

    def tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; a tag already there is overwritten."""
        self.wake()
        for batch in _batches(tags.items()):
            self._send(tags=[RunTag(key, value) for key, value in batch])

    def params(self, params: Mapping[str, str]) -> None:
        """Log parameters. MLflow never changes one: a value that differs from the first is kept as tag `param.KEY`."""
        self.wake()
        new = {key: value for key, value in params.items() if key not in self._params}
        for batch in _batches(new.items()):
            self._send(params=[Param(key, value) for key, value in batch])
        changed = {f"param.{key}"[:250]: value for key, value in params.items() if self._params.get(key, value) != value}
        self._params |= new
        if changed:
            self.tags(changed)

    def metrics(self, metrics: Mapping[str, float], *, timestamp_ms: int, step: int = 0) -> None:
        """Log figures that belong to one moment; the same ones again change nothing."""
        self.log_metrics([Metric(key, float(value), timestamp_ms, step) for key, value in metrics.items()])

    def log_metrics(self, metrics: list[Metric]) -> None:
        """Log metric entities, a thousand a call."""
        if metrics:
            self.wake()
        for start in range(0, len(metrics), _METRICS_PER_CALL):
            self._send(metrics=metrics[start : start + _METRICS_PER_CALL])

    def _send(self, *, metrics: Sequence[Metric] = (), params: Sequence[Param] = (), tags: Sequence[RunTag] = ()) -> None:
        self.store.ask(lambda client: client.log_batch(self.run_id, metrics=metrics, params=params, tags=tags))

    def file(self, path: Path, folder: str | None = None) -> None:
        """Upload a file, replacing one of the same name."""
        self.wake()
        self.store.ask(lambda client: client.log_artifact(self.run_id, str(path), folder))

    def files(self, directory: Path, folder: str) -> None:
        """Upload the contents of a directory; nothing when it does not exist."""
        if directory.is_dir():
            self.wake()
            self.store.ask(lambda client: client.log_artifacts(self.run_id, str(directory), folder))

    def text(self, text: str, name: str) -> None:
        """Upload a text as a file."""
        self.wake()
        self.store.ask(lambda client: client.log_text(self.run_id, text, name))

    def table(self, frame: pl.DataFrame, name: str) -> None:
        """Show a frame as an MLflow table; long texts are shortened there (the Parquet beside it has them whole)."""
        self.wake()
        folder = str(Path(name).parent) if "/" in name else None
        # log_table appends to a table that is there: the one left by a killed attempt is whole, and is kept.
        present = self.store.ask(lambda client: client.list_artifacts(self.run_id, folder))
        if name in {entry.path for entry in present}:
            return
        with warnings.catch_warnings():
            # mlflow asks pandas in a way that pandas will change; nothing for our user to do.
            warnings.simplefilter("ignore")
            self.store.ask(lambda client: client.log_table(self.run_id, _columns(frame), name))


def _columns(frame: pl.DataFrame) -> dict[str, list[object]]:
    """Plain columns of JSON values; nested values as JSON text."""
    columns: dict[str, list[object]] = {}
    for series in frame:
        values: list[object] = series.to_list()
        if series.dtype.is_nested():
            values = [None if value is None else json.dumps(value, ensure_ascii=False, default=str) for value in values]
        columns[series.name] = [_shorten(value) for value in values]
    return columns


def _shorten(value: object) -> object:
    if isinstance(value, str) and len(value) > _SHOWN_CHARS:
        return f"{value[:_SHOWN_CHARS]} ... ({len(value)} characters)"
    return value


def _batches(pairs: Iterable[tuple[str, str]]) -> Iterable[list[tuple[str, str]]]:
    """At most a hundred pairs a call, and less than MLflow's megabyte even when every character is escaped."""
    batch: list[tuple[str, str]] = []
    size = 0
    for key, value in pairs:
        weight = len(json.dumps([key, value]))
        if batch and (len(batch) == _PARAMS_PER_CALL or size + weight > _BYTES_PER_CALL):
            yield batch
            batch, size = [], 0
        batch.append((key, value))
        size += weight
    if batch:
        yield batch
