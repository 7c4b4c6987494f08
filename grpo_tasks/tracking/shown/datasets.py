"""The held-out set as an evaluation dataset of MLflow, one version for each of its contents.

    eval.parquet   ->   "NAME held-out v1"   {inputs: {messages}, expectations: {expected_response}}      changed data: v2

MLflow's own datasets have no versions, so a version is a dataset with the tags `version` and `digest`.
"""

import hashlib
from functools import partial
from typing import Any

import polars as pl
from mlflow import MlflowClient

from grpo_tasks.tracking.handle import RunHandle
from grpo_tasks.tracking.store import pages
from schemas.prompts import PLAIN
from schemas.results.data import DataReport

MAX_ROWS = 500
"""Rows of a held-out set that MLflow gets: it stores them one by one. All are in the artifact data/eval.parquet."""
_NAME = "name"
_VERSION = "version"
_DIGEST = "digest"
_COMPLETE = "complete"
"""Tag of a dataset whose rows are all there. A version that was interrupted is filled by the next run."""


def record_held_out(run: RunHandle, name: str, data: DataReport) -> None:
    """Create the version with these rows, unless there is one; the run's tag `held_out` names it.

    Args:
        run: the parent run.
        name: of the config. Versions are counted for each name.
        data: its held-out rows.
    """
    rows = pl.read_parquet(data.eval, columns=["prompt", "answer"])
    digest = hashlib.sha256(rows.write_json().encode()).hexdigest()
    with run.store.lock(f"dataset-{name}", who=f"a run that records the held-out set of {name}"):
        found = run.store.ask(partial(_versions, experiment_id=run.experiment_id, name=name))
        dataset = next((known for known in found if known.tags.get(_DIGEST) == digest), None)
        number = dataset.tags[_VERSION] if dataset else str(1 + max((int(known.tags[_VERSION]) for known in found), default=0))
        title = f"{name} held-out v{number}"
        if dataset is None or dataset.tags.get(_COMPLETE) != "yes":
            tags = {_NAME: name, _VERSION: number, _DIGEST: digest, "rows": str(rows.height)}
            run.store.ask(partial(_fill, run=run, dataset=dataset, title=title, tags=tags, records=_records(rows.head(MAX_ROWS))))
    run.tags({"held_out": title})


def _versions(client: MlflowClient, *, experiment_id: str, name: str) -> list[Any]:
    found = pages(lambda token: client.search_datasets(experiment_ids=[experiment_id], page_token=token))
    return [dataset for dataset in found if (dataset.tags or {}).get(_NAME) == name]


def _fill(
    client: MlflowClient, *, run: RunHandle, dataset: Any, title: str, tags: dict[str, str], records: list[dict[str, Any]]
) -> None:
    # Rows go to mlflow's global store. Rows with known inputs are replaced, so this can be repeated.
    with run.store.as_default():
        made = dataset or client.create_dataset(title, experiment_id=run.experiment_id, tags=tags)
        made.merge_records(records)
        client.set_dataset_tags(made.dataset_id, {_COMPLETE: "yes"})


def _records(rows: pl.DataFrame) -> list[dict[str, Any]]:
    records = []
    for prompt, answer in rows.iter_rows():
        plain = prompt[0]["role"] == PLAIN
        asked = {"prompt": prompt[0]["content"]} if plain else {"messages": prompt}
        records.append({"inputs": asked} | ({"expectations": {"expected_response": answer}} if answer is not None else {}))
    return records
