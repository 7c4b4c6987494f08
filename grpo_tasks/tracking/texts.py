"""What a person reads about a run and a version in MLflow: name, description and tags of a run, model card and tags of a version.

A description or a card is replaced when the decision changes, and never where a person wrote another text.
"""

import getpass
import hashlib
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from jinja2 import StrictUndefined, Template
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from grpo_tasks.content.markdown import code, table
from grpo_tasks.tracking.handle import RunHandle
from grpo_tasks.tracking.store import run_or_none
from schemas import metrics
from schemas.config.run import RunConfig
from schemas.paths import EMBEDDED, resolve
from schemas.results.data import DataReport
from schemas.results.evaluation import EvalReport, GuardCheck, Interval, PairedTest, Regression
from schemas.results.model import MergeProof
from schemas.results.publication import Publication
from schemas.secret import hide

DECISION_TAG = "grpo.decision"
"""Tag of a version and of the run that made it: why it became the champion, or did not."""
NOTE = "mlflow.note.content"
"""MLflow's tag for the description of a run or an experiment."""
VERSION = "grpo.model_version"
"""Tag of a run: NAME/VERSION of the model that it registered."""
FLOW_RUN_URL = "prefect.flow_run_url"
EXPERIMENT_TAGS = {
    # Decides which tabs MLflow shows: runs, models and traces of a training.
    "mlflow.experimentKind": "custom_model_development",
    NOTE: "Runs of grpo-pipeline. A run is a pipeline or a single step; the stages of a training are its child runs.",
}
AT_A_GLANCE = (metrics.ACCURACY, metrics.FORMAT_RATE, metrics.REWARD)
"""Figures of the merged model that the run has under their plain names too."""
NOTE_CHARS = 8_000
_DECISION_CHARS = 4_000
_AFTER_NOTE = "\n\nModel: ["
_WAY_BACK = "[Flow run in Prefect]("
_FIRST = "GRPO from the base model "
_SOURCE_CHARS = 500
_AGAINST = "against_"
CARD_TAG = "grpo.card"
"""Tag of a version: marks of the cards that it had. A description with another mark was written by a person."""
_CARD = Path(__file__).with_name("card.md")
_PROMPT_CHARS = 2_000
_HEAD_CHARS = 20_000
_VERDICT = {True: "Promoted", False: "Not promoted"}
_BEFORE_DECISION, _AFTER_DECISION = "(reinforcement learning from rewards) and merged. ", "\n\n## Trained for"


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


def merged_figures(figures: Mapping[str, Interval]) -> dict[str, float]:
    """The figures of the merged model that a list of runs shows."""
    return {name: figures[name].value for name in AT_A_GLANCE if name in figures}


def describe_decision(run: RunHandle, result: Publication) -> None:
    """Put the decision and a link to the version into the description of the run, and into its tags."""
    tags = run.store.call(lambda client: client.get_run(run.run_id)).data.tags
    run.tags(_decided(tags, f"{result.model_name}/{result.model_version}", promoted=result.champion, reason=result.reason))


def restate_decision(client: MlflowClient, version: ModelVersion, *, promoted: bool, reason: str) -> None:
    """Say what was decided after the run had ended: in the card of the version, in the run that made it, and in its tag."""
    name, number = version.name, str(version.version)
    before, said, rest = (client.get_model_version(name, number).description or "").partition(_BEFORE_DECISION)
    _, section, after = rest.partition(_AFTER_DECISION)
    if said and section:
        write_card(client, name, number, f"{before}{said}{_sentence(promoted, reason)}{section}{after}")
    run = run_or_none(client, version.run_id) if version.run_id else None
    # It may have been deleted, or have made another version since.
    if run is not None and run.info.lifecycle_stage == "active" and run.data.tags.get(VERSION) == f"{name}/{number}":
        for key, value in _decided(run.data.tags, f"{name}/{number}", promoted=promoted, reason=reason).items():
            client.set_tag(run.info.run_id, key, value)
    client.set_model_version_tag(name, number, DECISION_TAG, reason)


def _decided(tags: Mapping[str, str], version: str, *, promoted: bool, reason: str) -> dict[str, str]:
    """The tags of a run that say the decision, with its description unless a person wrote another one."""

    def said(promoted: bool, reason: str) -> str:
        return f"**{_VERDICT[promoted]}**: {reason[:_DECISION_CHARS]}."

    decided = {VERSION: version, "promoted": "yes" if promoted else "no", DECISION_TAG: reason[:_DECISION_CHARS]}
    head, _, first = tags.get(NOTE, "").rpartition("\n\n")
    before = head.partition(_AFTER_NOTE)[0]
    link_alone = before.startswith(_WAY_BACK) and before.endswith(")") and "\n" not in before
    ours = before in ("", *(said(champion, tags.get(DECISION_TAG, "")) for champion in (False, True)))
    if not first.startswith(_FIRST) or not (ours or link_alone):
        return decided
    (name, _, number), page = version.rpartition("/"), tags.get(FLOW_RUN_URL)
    link = f"{name} version {number}](#/models/{quote(name, safe='')}/versions/{number}). {f'{_WAY_BACK}{page})' if page else ''}"
    return decided | {NOTE: f"{said(promoted, reason)}{_AFTER_NOTE}{link.rstrip()}\n\n{first}"[:NOTE_CHARS]}


def decision_tags(
    reason: str, tests: Sequence[PairedTest], evaluation: EvalReport, checks: Sequence[Regression | GuardCheck]
) -> dict[str, str]:
    """Tags of a version: the decision, the tests and checks behind it, and the figures of the merged model."""
    tags = {DECISION_TAG: reason}
    for check in checks:
        if isinstance(check, GuardCheck):
            tags[metrics.member(metrics.GUARD_CHANGE, check.name)] = str(check)
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


def model_card(
    config: RunConfig,
    proof: MergeProof,
    evaluation: EvalReport,
    *,
    tests: Sequence[PairedTest],
    data: DataReport | None,
    promoted: bool,
    reason: str,
) -> str:
    """The description of a version, Markdown without a headline: card.md, filled. `data` is None where the run has read none."""
    stages = [
        [stage.name, ", ".join(stage.rewards), str(stage.max_steps), f"{stage.learning_rate:g}", str(stage.num_generations)]
        for stage in config.stages
    ]
    figures = []
    for name, found in evaluation.metrics.items():
        known = metrics.describe_figure(name)
        figures.append([name, f"{found.value:.4g}", f"{found.low:.4g} to {found.high:.4g}", known.meaning if known else ""])
    columns = ["metric", "value", f"{evaluation.confidence:.0%} interval", "meaning"]
    # Markdown, not a page: nothing is escaped, and `code` has made every text of a user harmless.
    template = Template(_CARD.read_text(encoding="utf-8"), trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return template.render(
        base=code(config.model.path + (f" at revision {config.model.revision}" if config.model.revision else "")),
        decision=_sentence(promoted, reason),
        config=config,
        name=config.registered_model,
        prompt=None if config.data.system_prompt is None else code(config.data.system_prompt[:_PROMPT_CHARS]),
        stages=table(["stage", "rewards", "updates at most", "learning rate", "group size"], stages),
        sources=", ".join(str(code(source.path)) for source in config.data.train),
        data=data,
        evaluation=evaluation,
        figures=table(columns, figures, right=["value"]),
        tests=tests,
        proof=proof,
        licence=licence(config.model.path),
    )


def says_not_promoted(description: str | None) -> bool:
    """Whether the card of a version says that it was not promoted."""
    return (description or "").partition(_BEFORE_DECISION)[2].startswith(_VERDICT[False])


def write_card(client: MlflowClient, name: str, version: str, card: str) -> None:
    """Make the card the description of a version, unless a person wrote the present one. Can be repeated."""

    def mark(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    found = client.get_model_version(name, version)
    present, marks = found.description or "", found.tags.get(CARD_TAG, "").split()
    if present == card and mark(card) in marks:
        return
    if present not in ("", card) and mark(present) not in marks:
        return
    # Both marks, and the tag first: a kill before the next call leaves the present text known as a card.
    client.set_model_version_tag(name, version, CARD_TAG, " ".join(dict.fromkeys([mark(card), mark(present)])))
    client.update_model_version(name, version, card)


def _sentence(promoted: bool, reason: str) -> str:
    return f"{_VERDICT[promoted]}: {reason}".rstrip(".") + "."


def licence(path: str) -> str:
    """What is known about the licence of a base model, without asking the network."""
    if path.startswith(EMBEDDED):
        return "The embedded model ships with this project, under the project's licence."
    folder = Path(resolve(path))
    if not folder.is_dir():
        return f"See https://huggingface.co/{path}."
    readme, declared = folder / "README.md", ""
    if readme.is_file():
        with readme.open(encoding="utf-8", errors="replace") as file:
            # The lines `name: value` between the `---` at the beginning: a hub model declares its licence there.
            head = file.read(_HEAD_CHARS).split("\n---", 1)[0]
        pairs = [line.partition(":") for line in head.splitlines()] if head.startswith("---\n") else []
        declared = next((value.strip() for name, _, value in pairs if name == "license"), "")
    if declared:
        return f"Declared in its README.md: {code(declared)}."
    files = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")
    named = next((name for name in files if (folder / name).is_file()), None)
    return f"See {named} in its folder." if named else "Unknown: its folder names none. Find it out before you pass the model on."
