"""What a list of runs shows: names, a description with the decision, source, user, and figures under short names.

    grpo-demo brisk-otter 2026-11-23 05:53     Promoted: better than the base ...     accuracy 0.976     promoted yes

Text that a person wrote over a description stays.
"""

import getpass
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from grpo_tasks.tracking.handle import RunHandle
from grpo_tasks.tracking.store import run_or_none
from schemas.config.run import RunConfig
from schemas.metrics import ACCURACY, FORMAT_RATE, GUARD_CHANGE, REWARD, member
from schemas.results.evaluation import EvalReport, GuardCheck, Interval, PairedTest, Regression
from schemas.results.publication import Publication
from schemas.secret import hide

DECISION_TAG = "grpo.decision"
"""Tag of a version and of the run that made it: why it became the champion, or did not."""
NOTE = "mlflow.note.content"
"""MLflow's tag for the description of a run or an experiment."""
VERSION = "grpo.model_version"
"""Tag of a run: NAME/VERSION of the model that it registered."""
FLOW_RUN_URL = "prefect.flow_run_url"
"""Tag of a run: the address of its page in Prefect."""
EXPERIMENT_TAGS = {
    # Decides which tabs MLflow shows: runs, models and traces of a training.
    "mlflow.experimentKind": "custom_model_development",
    NOTE: "Runs of grpo-pipeline. A run is a pipeline or a single step; the stages of a training are its child runs.",
}
AT_A_GLANCE = (ACCURACY, FORMAT_RATE, REWARD)
"""Figures of the merged model that the run has under their plain names too."""
NOTE_CHARS = 8_000
"""MLflow refuses a longer tag of a run."""
_DECISION_CHARS = 4_000
"""The description holds the decision, a link and the names of the stages."""
_AFTER_DECISION = "\n\nModel: ["
_WAY_BACK = "[Flow run in Prefect]("
_FIRST = "GRPO from the base model "
_SOURCE_CHARS = 500
_AGAINST = "against_"
"""Beginning of the tags that say what the version was compared with."""


def run_title(name: str, form_name: str | None, now: datetime) -> str:
    """The config's name, the name that the run has in Prefect's form, and when it started."""
    return " ".join(filter(None, [name, form_name, f"{now:%Y-%m-%d %H:%M}"]))


def origin_tags(config: RunConfig, flow_run_url: str | None) -> dict[str, str]:
    """Tags of a new run: who started it, by which command, from which base model; with a link to its page in Prefect."""
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number without a name
        user = "unknown"
    first = f"{_FIRST}`{config.model.path}`. Stages: {', '.join(stage.name for stage in config.stages)}."
    return {
        "mlflow.user": user,
        "mlflow.source.name": hide(command)[:_SOURCE_CHARS],
        "mlflow.source.type": "LOCAL",
        "base_model": config.model.path[:_SOURCE_CHARS],
        NOTE: f"{_WAY_BACK}{flow_run_url})\n\n{first}" if flow_run_url else first,
    }


def merged_figures(metrics: Mapping[str, Interval]) -> dict[str, float]:
    """The figures of the merged model that a list of runs shows."""
    return {name: metrics[name].value for name in AT_A_GLANCE if name in metrics}


def describe_decision(run: RunHandle, result: Publication) -> None:
    """Put the decision and a link to the version into the description, and into the tags that the view of decisions shows."""
    tags = run.store.ask(lambda client: client.get_run(run.run_id)).data.tags
    run.tags(_decided(tags, f"{result.model_name}/{result.model_version}", promoted=result.champion, reason=result.reason))


def restate_decision(client: MlflowClient, run_id: str, version: str, *, promoted: bool, reason: str) -> None:
    """Say in the run that made a version (NAME/VERSION) what was decided about it after the run had ended."""
    run = run_or_none(client, run_id)
    # It may have been deleted, or have made another version since.
    if run is not None and run.info.lifecycle_stage == "active" and run.data.tags.get(VERSION) == version:
        for name, value in _decided(run.data.tags, version, promoted=promoted, reason=reason).items():
            client.set_tag(run_id, name, value)


def _decided(tags: Mapping[str, str], version: str, *, promoted: bool, reason: str) -> dict[str, str]:
    """The tags of a run that say the decision, with its description unless a person wrote another one."""

    def said(promoted: bool, reason: str) -> str:
        return f"**{'Promoted' if promoted else 'Not promoted'}**: {reason[:_DECISION_CHARS]}."

    decided = {VERSION: version, "promoted": "yes" if promoted else "no", DECISION_TAG: reason[:_DECISION_CHARS]}
    present = tags.get(NOTE, "")
    head, _, first = present.rpartition("\n\n")
    before = head.partition(_AFTER_DECISION)[0]
    link_alone = before.startswith(_WAY_BACK) and before.endswith(")") and "\n" not in before
    ours = before in ("", *(said(champion, tags.get(DECISION_TAG, "")) for champion in (False, True)))
    if not first.startswith(_FIRST) or not (ours or link_alone):
        return decided
    (name, _, number), page = version.rpartition("/"), tags.get(FLOW_RUN_URL)
    link = f"{name} version {number}](#/models/{quote(name, safe='')}/versions/{number}). {f'{_WAY_BACK}{page})' if page else ''}"
    return decided | {NOTE: f"{said(promoted, reason)}{_AFTER_DECISION}{link.rstrip()}\n\n{first}"[:NOTE_CHARS]}


def decision_tags(
    reason: str, tests: Sequence[PairedTest], evaluation: EvalReport, checks: Sequence[Regression | GuardCheck]
) -> dict[str, str]:
    """The decision, the tests and checks behind it, and the figures of the merged model."""
    tags = {DECISION_TAG: reason}
    for check in checks:
        if isinstance(check, GuardCheck):
            tags[member(GUARD_CHANGE, check.name)] = str(check)
        else:
            bound = f"limit {check.limit:.6g}" if check.p_value is None else f"p = {check.p_value:.3g}"
            tags[f"{_AGAINST}{check.against}.{check.metric}"] = f"{check.theirs:.6g} ({bound})"
    for test in tests:
        said = {"metric": test.metric, "difference": f"{test.difference:.6g}", "p_value": f"{test.p_value:.6g}"}
        tags |= {f"{_AGAINST}{test.against}.{name}": value for name, value in said.items()}
    return tags | {metric: f"{interval.value:.6g}" for metric, interval in evaluation.metrics.items()}


def tag_decision(client: MlflowClient, *, version: ModelVersion, tags: Mapping[str, str], keep: bool) -> None:
    """Replace what an earlier decision said about a version. With `keep` it stays, and only what is missing is added."""
    name, number, present = version.name, str(version.version), version.tags
    for key, value in tags.items():
        if key not in present or (present[key] != value and not keep):
            client.set_model_version_tag(name, number, key, value)
    # Of a champion that the version is not compared with any more.
    for key in [] if keep else [key for key in present if key.startswith(_AGAINST) and key not in tags]:
        client.delete_model_version_tag(name, number, key)
