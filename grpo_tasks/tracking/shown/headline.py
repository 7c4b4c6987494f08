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

from grpo_tasks.content.markdown import table
from grpo_tasks.tracking.handle import RunHandle
from grpo_tasks.tracking.store import run_or_none
from schemas.config.run import RunConfig
from schemas.metrics import ACCURACY, FORMAT_RATE, GUARD_CHANGE, REWARD, member
from schemas.results.evaluation import EvalReport, GuardCheck, Interval, PairedTest, Regression
from schemas.results.publication import Publication
from schemas.secret import hide

DECISION_TAG = "grpo.decision"
"""Tag of a version: the reason of the decision about it."""
NOTE = "mlflow.note.content"
"""MLflow's tag for the description of a run or an experiment."""
DECISION = "grpo.decision"
"""Tag of a run: why its version became the champion, or did not."""
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
_SOURCE_CHARS = 500

_AGAINST = "against_"
"""Beginning of the tags that say what the version was compared with."""


def run_title(name: str, form_name: str | None, now: datetime) -> str:
    """The config's name, the name that the run has in Prefect's form, and when it started."""
    return " ".join(filter(None, [name, form_name, f"{now:%Y-%m-%d %H:%M}"]))


def origin_tags(config: RunConfig, flow_run_url: str | None) -> dict[str, str]:
    """Tags of a new run: who started it, by which command, from which base model; with a link to its page in Prefect."""
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {
        "mlflow.user": _user(),
        "mlflow.source.name": hide(command)[:_SOURCE_CHARS],
        "mlflow.source.type": "LOCAL",
        "base_model": config.model.path[:_SOURCE_CHARS],
        NOTE: "\n\n".join(filter(None, [_way_back(flow_run_url), first_note(config)])),
    }


def _way_back(flow_run_url: str | None) -> str:
    return f"{_WAY_BACK}{flow_run_url})" if flow_run_url else ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number without a name
        return "unknown"


def first_note(config: RunConfig) -> str:
    """Description of a run that has not decided anything yet."""
    stages = ", ".join(stage.name for stage in config.stages)
    return f"GRPO from the base model `{config.model.path}`. Stages: {stages}."


def merged_figures(metrics: Mapping[str, Interval]) -> dict[str, float]:
    """The figures of the merged model that a list of runs shows."""
    return {name: metrics[name].value for name in AT_A_GLANCE if name in metrics}


def describe_decision(run: RunHandle, config: RunConfig, result: Publication) -> None:
    """Put the decision and a link to the version into the description, and into the tags that the view of decisions shows."""
    name, version = result.model_name, result.model_version
    link = f"{name} version {version}](#/models/{quote(name, safe='')}/versions/{version})"
    tags = run.store.ask(lambda client: client.get_run(run.run_id)).data.tags
    back = _way_back(tags.get(FLOW_RUN_URL))
    decision = _said(result.champion, result.reason) + f"{_AFTER_DECISION}{link}. {back}".rstrip()
    first = first_note(config)
    note = {NOTE: f"{decision}\n\n{first}"[:NOTE_CHARS]} if _is_written_by_us(tags, first) else {}
    run.tags({VERSION: f"{name}/{version}"} | _decision_tags(result.champion, result.reason) | note)


def _is_written_by_us(tags: Mapping[str, str], first: str) -> bool:
    """Whether the description of a run is that of its beginning, or that of its last decision."""
    present = tags.get(NOTE, "")
    head = present.removesuffix(first).strip()
    decided = head.partition(_AFTER_DECISION)[0] in _said_before(tags)
    way_back = head.startswith(_WAY_BACK) and head.endswith(")") and "\n" not in head
    return not present or (present.endswith(first) and (not head or decided or way_back))


def _said_before(tags: Mapping[str, str]) -> list[str]:
    """How a description begins that says the decision in the tags."""
    return [_said(promoted, tags.get(DECISION, "")) for promoted in (False, True)]


def restate_decision(client: MlflowClient, run_id: str, version: str, *, promoted: bool, reason: str) -> None:
    """Say in the run that made a version (NAME/VERSION) what was decided after its end; a text that a person wrote stays."""
    run = run_or_none(client, run_id)
    if run is None:
        return
    tags = run.data.tags
    if run.info.lifecycle_stage != "active" or tags.get(VERSION) != version:
        # It was deleted, or it has made another version since.
        return
    before, rest = tags.get(NOTE, "").partition(_AFTER_DECISION)[::2]
    written_by_us = rest and before in _said_before(tags)
    note = {NOTE: f"{_said(promoted, reason)}{_AFTER_DECISION}{rest}"[:NOTE_CHARS]} if written_by_us else {}
    for name, value in (_decision_tags(promoted, reason) | note).items():
        client.set_tag(run_id, name, value)


def _said(promoted: bool, reason: str) -> str:
    return f"**{'Promoted' if promoted else 'Not promoted'}**: {reason[:_DECISION_CHARS]}."


def _decision_tags(promoted: bool, reason: str) -> dict[str, str]:
    return {"promoted": "yes" if promoted else "no", DECISION: reason[:_DECISION_CHARS]}


def guards_markdown(guards: Sequence[GuardCheck]) -> str:
    """A table of all guards, then the examples of those that failed; empty when there are no guards."""
    if not guards:
        return ""
    rows = [
        [
            f"{guard.name} against {guard.against}",
            guard.metric,
            f"{guard.theirs:.4g}",
            f"{guard.ours:.4g}",
            guard.limit,
            f"{guard.p_value:.2g}",
            "yes" if guard.passed else "no",
        ]
        for guard in guards
    ]
    headings = ["guard", "metric", "before", "after", "limit", "p", "passed"]
    sections = ["", table(headings, rows, right=["before", "after", "p"])]
    for guard in guards:
        if not guard.passed:
            sections.append(f"## Worse: {guard.name} ({guard.metric})")
        sections += [
            f"Question:\n\n{_block(one.question)}\n\nBefore:\n\n{_block(one.before)}\n\n"
            f"After ({one.change:+.4g}):\n\n{_block(one.after)}"
            for one in guard.worse
        ]
    return "\n\n".join(sections) + "\n"


def _block(text: str) -> str:
    # An indented block shows any text literally; a completion may itself contain fences, HTML or headings.
    return "\n".join("    " + line for line in text.splitlines()) or "    (empty)"


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
        tags[f"{_AGAINST}{test.against}.metric"] = test.metric
        tags[f"{_AGAINST}{test.against}.difference"] = f"{test.difference:.6g}"
        tags[f"{_AGAINST}{test.against}.p_value"] = f"{test.p_value:.6g}"
    return tags | {metric: f"{interval.value:.6g}" for metric, interval in evaluation.metrics.items()}


def tag_decision(client: MlflowClient, *, version: ModelVersion, tags: Mapping[str, str], keep: bool) -> None:
    """Replace what an earlier decision said about a version. With `keep` it stays, and only what is missing is added."""
    name, number, present = version.name, str(version.version), version.tags
    for key, value in tags.items():
        if key not in present or (present[key] != value and not keep):
            client.set_model_version_tag(name, number, key, value)
    for key in present:
        if key.startswith(_AGAINST) and key not in tags and not keep:
            # Of a champion that the version is not compared with any more.
            client.delete_model_version_tag(name, number, key)
