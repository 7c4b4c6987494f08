"""One MLflow run, written only by calls that can be repeated.

Reading a run does not change it: its status becomes RUNNING with the first write. After a kill between the work of `once` and its
marker the work runs again, so each write replaces or equals the one before: metrics carry the time of their result, not of the
upload; files and tables are replaced.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import polars as pl
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

from grpo_tasks.tracking.store import Store
from schemas.secret import hide_written

MARKER = "grpo.recorded"
"""Tag with the markers of what is recorded, one a line; more than a tag holds continue in MARKER.2, MARKER.3 ..."""
_MARKER_CHARS = 5_000
MAX_METRICS = 1_000
"""Most metrics that MLflow takes in one call; of parameters and of tags it takes a hundred."""
_BYTES_PER_CALL = 500_000
_SHOWN_CHARS = 2_000

T = TypeVar("T")
EndStatus = Literal["FINISHED", "FAILED", "KILLED"]


class RunHandle:
    """A parent or child run. `on_start` is called once, before the first write."""

    def __init__(self, store: Store, run: Run, *, on_start: Callable[["RunHandle"], None] | None = None) -> None:
        self.store = store
        self.run_id: str = run.info.run_id
        self.experiment_id: str = run.info.experiment_id
        self.status: str = run.info.status
        self.started_ms: int = run.info.start_time
        self._params = dict(run.data.params)
        self._markers = _markers(run.data.tags)
        self._on_start = on_start
        self._writes = False

    def mark_running(self) -> None:
        """Set the status to RUNNING. Every method that writes calls this first."""
        if self._writes:
            return
        self._writes = True
        if self.status != "RUNNING":
            self.store.call(lambda client: client.update_run(self.run_id, status="RUNNING"))
            self.status = "RUNNING"
        if self._on_start:
            self._on_start(self)

    def end(self, status: EndStatus) -> None:
        """Set the final status, unless the run already has it and this handle has written nothing."""
        if not self._writes and self.status == status:
            return
        self.store.call(lambda client: client.set_terminated(self.run_id, status=status))
        self.status = status
        self._writes = False

    def once(self, marker: str, work: Callable[[], None]) -> bool:
        """Run repeatable work unless it was recorded completely; True when it ran now."""
        if marker in self._markers:
            return False
        # Without the lock, two processes that record one run could both find a table missing and both append to it. Sixteen locks
        # shared by all runs, so that lock files do not accumulate.
        with self.store.lock(f"record-{self.run_id[:1]}", who=f"a process that records the run {self.run_id}"):
            # The other process may have recorded it while this one waited.
            self._markers |= _markers(self._tags())
            if marker in self._markers:
                return False
            self.mark_running()
            work()
            self._markers.add(marker)
            texts = map("\n".join, batches(sorted(self._markers), lambda line: len(line) + 1, _MARKER_CHARS))
            self.tags({MARKER if number == 1 else f"{MARKER}.{number}": text for number, text in enumerate(texts, start=1)})
        return True

    def tags(self, tags: Mapping[str, str]) -> None:
        """Set tags. Existing tags of the same name are overwritten."""
        self.mark_running()
        for batch in batches(tags.items(), _weight, _BYTES_PER_CALL):
            self._send(tags=[RunTag(key, hide_written(value)) for key, value in batch])

    def params(self, params: Mapping[str, str]) -> None:
        """Log parameters. MLflow cannot change one, so a value that differs from the first becomes the tag `param.KEY`."""
        self.mark_running()
        params = {key: hide_written(value) for key, value in params.items()}
        new = {key: value for key, value in params.items() if key not in self._params}
        for batch in batches(new.items(), _weight, _BYTES_PER_CALL):
            self._send(params=[Param(key, value) for key, value in batch])
        changed = {f"param.{key}"[:250]: value for key, value in params.items() if self._params.get(key, value) != value}
        self._params |= new
        if changed:
            self.tags(changed)

    def metrics(self, metrics: Mapping[str, float], *, timestamp_ms: int, step: int = 0) -> None:
        """Log values that belong to one moment. Logging them again changes nothing."""
        self.log_metrics([Metric(key, float(value), timestamp_ms, step) for key, value in metrics.items()])

    def log_metrics(self, metrics: list[Metric]) -> None:
        """`metrics` with a step, a model or a data set of their own."""
        for batch in batches(metrics, lambda _: 1, MAX_METRICS):
            self.mark_running()
            self._send(metrics=batch)

    def _send(self, *, metrics: Sequence[Metric] = (), params: Sequence[Param] = (), tags: Sequence[RunTag] = ()) -> None:
        self.store.call(lambda client: client.log_batch(self.run_id, metrics=metrics, params=params, tags=tags))

    def _tags(self) -> dict[str, str]:
        return self.store.call(lambda client: client.get_run(self.run_id)).data.tags

    def file(self, path: Path, folder: str | None = None) -> None:
        """Upload a file, replacing one of the same name."""
        self.mark_running()
        self.store.call(lambda client: client.log_artifact(self.run_id, str(path), folder))

    def files(self, directory: Path, folder: str) -> None:
        """Upload the contents of a directory, if it exists."""
        if directory.is_dir():
            self.mark_running()
            self.store.call(lambda client: client.log_artifacts(self.run_id, str(directory), folder))

    def text(self, text: str, name: str) -> None:
        """Upload a text as a file, without the secrets in it."""
        self.mark_running()
        self.store.call(lambda client: client.log_text(self.run_id, hide_written(text), name))

    def table(self, frame: pl.DataFrame, name: str) -> None:
        """Upload a frame as an MLflow table, replacing an earlier one. Long texts are shortened; the Parquet artifact is not."""
        # Imported here: it takes long, and most processes draw no table.
        import pandas as pd

        def cell(value: object, *, nested: bool) -> object:
            if nested and value is not None:
                value = json.dumps(value, ensure_ascii=False, default=str)
            if isinstance(value, str) and len(value) > _SHOWN_CHARS:
                return f"{value[:_SHOWN_CHARS]} ... ({len(value)} characters)"
            return value

        columns = {one.name: [cell(value, nested=one.dtype.is_nested()) for value in one.to_list()] for one in frame}
        # Not mlflow's log_table, which appends to a table that is there. Its format, and the tag by which the UI finds it:
        self.text(pd.DataFrame(columns).to_json(orient="split", index=False, date_format="iso"), name)
        known = json.loads(self._tags().get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
        if (entry := {"path": name, "type": "table"}) not in known:
            self.tags({MLFLOW_LOGGED_ARTIFACTS: json.dumps([*known, entry])})


def _markers(tags: Mapping[str, str]) -> set[str]:
    ours = {tag: text for tag, text in tags.items() if f"{tag}.".startswith(f"{MARKER}.")}
    # Runs of earlier versions have a tag `MARKER.NAME` with the text `true` for each marker.
    lists = (tag.removeprefix(f"{MARKER}.") if text == "true" else text for tag, text in ours.items())
    return {marker for names in lists for marker in names.split("\n")}


def batches(items: Iterable[T], weigh: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """The items in their order, cut into lists that weigh at most `most`."""
    batch: list[T] = []
    size = 0
    for item in items:
        weight = weigh(item)
        if batch and size + weight > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += weight
    if batch:
        yield batch


def _weight(pair: tuple[str, str]) -> int:
    """Bytes, escaped as far as possible; at least so many that no call has more than a hundred pairs, as MLflow demands."""
    return max(len(json.dumps(pair)), _BYTES_PER_CALL // 100)
