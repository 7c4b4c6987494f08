"""What a run used, with versions: its system prompt in MLflow's prompt registry, its held-out rows as an evaluation dataset."""

import hashlib
import re
from functools import partial
from typing import Any

import polars as pl
from mlflow import MlflowClient

from grpo_tasks.tracking.handle import RunHandle
from grpo_tasks.tracking.store import pages
from schemas.prompts import PLAIN
from schemas.results.data import DataReport

LONGEST = 50_000
"""Characters of a prompt that the registry takes. A longer one is a parameter of the run only."""
PROMPT_TAG = "system_prompt"
"""Tag of a run: name and version of its system prompt."""

MAX_ROWS = 500
"""Rows of a held-out set that MLflow gets: it stores them one by one. All are in the artifact data/eval.parquet."""
_NAME = "name"
_VERSION = "version"
_DIGEST = "digest"
_COMPLETE = "complete"
"""Tag of a dataset whose rows are all there. A version that was interrupted is filled by the next run."""


def record_system_prompt(run: RunHandle, name: str, text: str | None) -> str | None:
    """Register the text, unless a version has it, and link it to the run.

    Returns:
        NAME/VERSION of the prompt, which is called after the registered model `name`; None without a system prompt.
    """
    if not text or len(text) > LONGEST:
        return None
    prompt = re.sub(r"[^\w.-]", "-", f"{name}-system-prompt", flags=re.ASCII)
    with run.store.lock(f"prompt-{prompt}", who=f"a run that registers the prompt {prompt}"):
        version = run.store.ask_globally(partial(_version, name=prompt, text=text, experiment_id=run.experiment_id))

        def link() -> None:
            run.store.ask_globally(lambda client: client.link_prompt_version_to_run(run.run_id, f"prompts:/{prompt}/{version}"))
            run.tags({PROMPT_TAG: f"{prompt}/{version}"})

        run.once(f"prompt.{prompt}.{version}", link)
    return f"{prompt}/{version}"


def link_to_model(run: RunHandle, prompt: str, model_id: str) -> None:
    """Link NAME/VERSION of a prompt to a logged model."""
    name, _, version = prompt.rpartition("/")
    run.store.ask_globally(lambda client: client.link_prompt_version_to_model(name, version, model_id))


def _version(client: MlflowClient, *, name: str, text: str, experiment_id: str) -> str:
    """The newest version with this text; registered now if there is none."""
    if client.get_prompt(name) is not None:
        versions = pages(lambda token: client.search_prompt_versions(name, page_token=token))
        same = [str(known.version) for known in versions if known.template == text]
        if same:
            return max(same, key=int)
    made = client.register_prompt(name, text, commit_message="system prompt of a training")
    # MLflow shows a prompt in the experiment that is active in this process, which is not the run's.
    client.set_prompt_tag(name, "_mlflow_experiment_ids", f",{experiment_id},")
    return str(made.version)


def record_held_out(run: RunHandle, name: str, data: DataReport) -> None:
    """Create the version of the held-out rows of a config `name`, unless there is one; the run's tag `held_out` names it.

    MLflow's own datasets have no versions, so a version is a dataset with the tags `version` and `digest`.
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
            records = _records(rows.head(MAX_ROWS))

            def fill(client: MlflowClient) -> None:
                # Rows with known inputs are replaced, so this can be repeated.
                made = dataset or client.create_dataset(title, experiment_id=run.experiment_id, tags=tags)
                made.merge_records(records)
                client.set_dataset_tags(made.dataset_id, {_COMPLETE: "yes"})

            run.store.ask_globally(fill)
    run.tags({"held_out": title})


def _versions(client: MlflowClient, *, experiment_id: str, name: str) -> list[Any]:
    found = pages(lambda token: client.search_datasets(experiment_ids=[experiment_id], page_token=token))
    return [dataset for dataset in found if (dataset.tags or {}).get(_NAME) == name]


def _records(rows: pl.DataFrame) -> list[dict[str, Any]]:
    records = []
    for prompt, answer in rows.iter_rows():
        asked = {"prompt": prompt[0]["content"]} if prompt[0]["role"] == PLAIN else {"messages": prompt}
        records.append({"inputs": asked} | ({"expectations": {"expected_response": answer}} if answer is not None else {}))
    return records
