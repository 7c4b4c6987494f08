"""One MLflow run, written only by calls that can be repeated.

    once(marker, work)   ->  skipped if the marker is set; otherwise: wake, work, and set the marker last

Reading a run does not change it: its status becomes RUNNING with the first write (`wake`). After a kill between work and marker
the work runs again, so each write replaces or equals the one before: metrics carry the time of their result, not of the upload;
files and tables are replaced.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import polars as pl
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

from grpo_tasks.tracking.store import Store
from schemas.secret import hide_written

MARKER = "grpo.recorded"
"""Tag with the markers of what is recorded, one a line; more than a tag holds continue in MARKER.2, MARKER.3 ..."""
_MARKER_CHARS = 5_000
_PARAMS_PER_CALL = 100
_METRICS_PER_CALL = 1_000
_BYTES_PER_CALL = 500_000
_SHOWN_CHARS = 2_000

EndStatus = Literal["FINISHED", "FAILED", "KILLED"]


class RunHandle:
    """A parent or child run. `on_wake` is called once, before the first write."""

    def __init__(self, store: Store, run: Run, *, on_wake: Callable[["RunHandle"], None] | None = None) -> None:
        self.store = store
        self.run_id: str = run.info.run_id
        self.experiment_id: str = run.info.experiment_id
        self.status: str = run.info.status
        self.started_ms: int = run.info.start_time
        self._params = dict(run.data.params)
        self._markers = _markers(run.data.tags)
        self._on_wake = on_wake
        self._awake = False

    @property
    def awake(self) -> bool:
        """Whether this handle has written anything."""
        return self._awake

    def wake(self) -> None:
        """Set the status to RUNNING. Every method that writes calls this first."""
        if self._awake:
            return
        self._awake = True
        if self.status != "RUNNING":
            self.store.ask(lambda client: client.update_run(self.run_id, status="RUNNING"))
            self.status = "RUNNING"
        if self._on_wake:
            self._on_wake(self)

    def end(self, status: EndStatus) -> None:
        """Set the final status, unless the run already has it and this handle has written nothing."""
        if not self._awake and self.status == status:
            return
        self.store.ask(lambda client: client.set_terminated(self.run_id, status=status))
        self.status = status
        self._awake = False

    def has(self, marker: str) -> bool:
        """Whether this work was recorded completely."""
        return marker in self._markers

    def once(self, marker: str, work: Callable[[], None]) -> bool:
        """Run repeatable work unless it is recorded; True when it ran now."""
        if self.has(marker):
            return False
        # Without the lock, two processes that record one run could both find a table missing and both append to it. Sixteen locks
        # shared by all runs, so that lock files do not accumulate.
        with self.store.lock(f"record-{self.run_id[:1]}", who=f"a process that records the run {self.run_id}"):
            # The other process may have recorded it while this one waited.
            self._markers |= self._recorded()
            if self.has(marker):
                return False
            self.wake()
            work()
            self._markers.add(marker)
            self.tags(_marker_tags(self._markers))
        return True

    def _recorded(self) -> set[str]:
        """The run's markers in the store."""
        return _markers(self.store.ask(lambda client: client.get_run(self.run_id)).data.tags)

    def tags(self, tags: Mapping[str, str]) -> None:
        """Set tags. Existing tags of the same name are overwritten."""
        self.wake()
        for batch in _batches(tags.items()):
            self._send(tags=[RunTag(key, hide_written(value)) for key, value in batch])

    def params(self, params: Mapping[str, str]) -> None:
        """Log parameters. MLflow cannot change one, so a value that differs from the first becomes the tag `param.KEY`."""
        self.wake()
        params = {key: hide_written(value) for key, value in params.items()}
        new = {key: value for key, value in params.items() if key not in self._params}
        for batch in _batches(new.items()):
            self._send(params=[Param(key, value) for key, value in batch])
        changed = {f"param.{key}"[:250]: value for key, value in params.items() if self._params.get(key, value) != value}
        self._params |= new
        if changed:
            self.tags(changed)

    def metrics(self, metrics: Mapping[str, float], *, timestamp_ms: int, step: int = 0) -> None:
        """Log values that belong to one moment. Logging them again changes nothing."""
        self.log_metrics([Metric(key, float(value), timestamp_ms, step) for key, value in metrics.items()])

    def log_metrics(self, metrics: list[Metric]) -> None:
        """Log metric entities, a thousand per call."""
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
        """Upload the contents of a directory, if it exists."""
        if directory.is_dir():
            self.wake()
            self.store.ask(lambda client: client.log_artifacts(self.run_id, str(directory), folder))

    def text(self, text: str, name: str) -> None:
        """Upload a text as a file, without the secrets in it."""
        self.wake()
        shown = hide_written(text)
        self.store.ask(lambda client: client.log_text(self.run_id, shown, name))

    def table(self, frame: pl.DataFrame, name: str) -> None:
        """Upload a frame as an MLflow table, replacing an earlier one. Long texts are shortened; the Parquet artifact is not."""
        # Imported here: it takes long, and most processes draw no table.
        import pandas as pd

        # Not mlflow's log_table, which appends to a table that is there. Its format, and the tag by which the UI finds it:
        text = pd.DataFrame(_columns(frame)).to_json(orient="split", index=False, date_format="iso")
        self.text(text, name)
        self.store.ask(lambda client: _enter_table(client, self.run_id, name))


def _enter_table(client: MlflowClient, run_id: str, name: str) -> None:
    known = json.loads(client.get_run(run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
    entry = {"path": name, "type": "table"}
    if entry not in known:
        client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*known, entry]))


def _markers(tags: Mapping[str, str]) -> set[str]:
    texts = [text for tag, text in tags.items() if tag == MARKER or tag.startswith(f"{MARKER}.")]
    # Runs of earlier versions have a tag for each marker.
    single = {tag.removeprefix(f"{MARKER}.") for tag, text in tags.items() if tag.startswith(f"{MARKER}.") and text == "true"}
    return single | {marker for text in texts if text != "true" for marker in text.split("\n")}


def _marker_tags(markers: set[str]) -> dict[str, str]:
    texts = [""]
    for marker in sorted(markers):
        if len(texts[-1]) + len(marker) >= _MARKER_CHARS:
            texts.append("")
        texts[-1] += f"\n{marker}" if texts[-1] else marker
    return {MARKER if number == 1 else f"{MARKER}.{number}": text for number, text in enumerate(texts, start=1)}


def _columns(frame: pl.DataFrame) -> dict[str, list[object]]:
    """Columns of plain JSON values; nested values become JSON text."""
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
    """At most a hundred pairs per call, and less than MLflow's limit of a megabyte even if every character is escaped."""
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
