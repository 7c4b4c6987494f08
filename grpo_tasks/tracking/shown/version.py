"""What the registry shows of a version next to its card: the decision with the figures that it was made by, as tags."""

from collections.abc import Mapping, Sequence

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from grpo_tasks.tracking.registry import DECISION_TAG
from schemas.metrics import GUARD_CHANGE, member
from schemas.results.evaluation import EvalReport, GuardCheck, PairedTest, Regression

_AGAINST = "against_"
"""Beginning of the tags that say what the version was compared with."""


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
