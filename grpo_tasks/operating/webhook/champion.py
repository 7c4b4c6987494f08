"""The message about a change of the champion, made of what the registry has recorded about both versions.

    alias moved: run | approval | grpo promote | grpo rollback  ->  tell_champion_changed(...)  ->  send.py

A message that cannot be made or sent becomes a sentence for a warning. It never fails a promotion: the alias has moved already.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from grpo_tasks.operating.webhook.send import host_of, send
from grpo_tasks.running.links import mlflow_pages
from grpo_tasks.tracking.registry import DECISION_TAG, find_version, lineage_of, recorded_config
from grpo_tasks.tracking.shown.headline import FLOW_RUN_URL
from grpo_tasks.tracking.store import Store, open_store, run_or_none
from schemas.config.operations import TrackingConfig, WebhookConfig
from schemas.config.yaml_text import parse_yaml
from schemas.errors import ModelError
from schemas.secret import hide

EVENT = "champion.changed"
How = Literal["promoted", "approved", "rolled back"]


def tell_champion_changed(
    name: str, version: str, before: str, how: How, tracking: TrackingConfig, hook: WebhookConfig | None = None
) -> str:
    """Send the message about a champion that has changed, if there is a receiver.

    Args:
        name: of the registered model.
        version: the champion now.
        before: the champion before; empty if there was none.
        how: how it became the champion.
        tracking: the store.
        hook: the receiver. None: the one in the recorded config of the version that was made last.

    Returns:
        A sentence for a warning; empty if the message arrived, or if there is no receiver.
    """
    place = "the receiver in the recorded config"
    try:
        hook = hook or recorded_hook(name, version, before, tracking)
        if hook.url is None:
            return ""
        place = host_of(hook.url)
        problem = send(hook, champion_message(name, version, before, how, tracking))
    except Exception as error:  # whatever it is, the alias has moved, and the run or the command continues
        problem = hide(str(error)) or type(error).__name__
    return f"{place} was not notified that version {version} of {name} is the champion: {problem}" if problem else ""


def recorded_hook(name: str, version: str, before: str, tracking: TrackingConfig) -> WebhookConfig:
    """The receiver in the recorded config of the newer version, or else of the other one."""
    for number in sorted({version, before} - {""}, key=int, reverse=True):
        try:
            lineage = lineage_of(f"{name}/{number}", tracking)
        except ModelError:
            # This project did not make it, so it has no config.
            continue
        tree = parse_yaml(recorded_config(lineage, tracking), place=f"config.yaml of run {lineage.run_id}")
        found = (tree.get("tracking") or {}).get("webhook") or {}
        if found.get("url"):
            return WebhookConfig.model_validate(found)
    return WebhookConfig()


def champion_message(name: str, version: str, before: str, how: How, tracking: TrackingConfig) -> dict[str, object]:
    """What the receiver gets."""
    store = open_store(tracking)
    now = _facts(store, name, version, tracking)
    old = _facts(store, name, before, tracking) if before else None
    return {
        "event": EVENT,
        "how": how,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": name,
        "version": version,
        "version_before": before or None,
        "reason": now["tags"].get(DECISION_TAG, ""),
        "metric": _metric(now["tags"], old["tags"] if old else {}, how),
        "run": now["run"],
        "run_before": old["run"] if old else None,
    }


def _facts(store: Store, name: str, version: str, tracking: TrackingConfig) -> dict[str, Any]:
    """Tags of a version, and the ids and pages of the run that made it."""
    found = find_version(f"{name}/{version}", tracking)
    run_id = found.run_id or ""
    run = store.ask(partial(run_or_none, run_id=run_id)) if run_id else None
    if run is None:
        return {"tags": found.tags, "run": {"mlflow_run_id": run_id, "flow_run_id": "", "links": {}}}
    pages = mlflow_pages(store.uri, run.info.experiment_id, run_id)
    links = {"run": pages.run, "version": pages.version(name, version)} if pages else {}
    flow_run = run.data.tags.get(FLOW_RUN_URL, "")
    if flow_run:
        links["flow_run"] = flow_run
    ids = {"mlflow_run_id": run_id, "flow_run_id": run.data.tags.get("prefect.flow_run_id", "")}
    return {"tags": found.tags, "run": ids | {"links": links}}


def _metric(now: Mapping[str, str], old: Mapping[str, str], how: How) -> dict[str, object] | None:
    """The metric that decided, of the champion before and of the new one; None for a version that nothing was recorded about.

    A new version was compared with the champion, or with the base if there was none, on the same prompts. After a rollback both
    figures are those of the versions' own evaluations.
    """
    rival = "champion" if "against_champion.metric" in now else "base"
    metric = now.get(f"against_{rival}.metric") or old.get("against_champion.metric") or old.get("against_base.metric", "")
    if metric not in now:
        return None
    after = float(now[metric])
    if how == "rolled back":
        return {
            "name": metric,
            "before": float(old[metric]) if metric in old else None,
            "after": after,
            "compared_with": "version",
        }
    difference = now.get(f"against_{rival}.difference")
    figure = round(after - float(difference), 6) if difference is not None else None
    return {"name": metric, "before": figure, "after": after, "compared_with": rival}
