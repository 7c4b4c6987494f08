"""Settings of earlier versions that are no settings any more: what to do instead, and configs that were recorded with them."""

from collections.abc import Sequence
from typing import Any

GONE: dict[str, str] = {
    "tracking.webhook": "MLflow's server sends signed webhooks itself; examples/webhook registers one",
    "tracking.flush_interval_s": "a stage's journal is sent every 5 seconds",
    "rewards.functions.NAME.adaptive.shrink": "a weight shrinks by a tenth where success is common",
    "rewards.functions.NAME.adaptive.min_scale": "a weight stays at a quarter of the configured one or more",
    "rewards.functions.NAME.adaptive.max_scale": "a weight stays at four times the configured one or less",
    "rewards.functions.NAME.judge.max_call_s": "a judge has two hours for a batch; max_outage_s limits the wait for its endpoint",
}
"""Place of the setting -> what to do instead."""


def why_gone(location: Sequence[Any]) -> str:
    """What to do instead of the setting at `location`, a path such as ("tracking", "webhook"); empty if there was none."""
    place = [str(part) for part in location]
    found = [advice for gone, advice in GONE.items() if _fits(place, gone.split("."))]
    return f"it is no setting any more: {found[0]}" if found else ""


def without_gone(tree: dict[str, Any]) -> dict[str, Any]:
    """A recorded config without the settings that are gone. It is read to repeat or show what was done, not to be corrected."""

    def kept(node: Any, place: tuple[Any, ...]) -> Any:
        if not isinstance(node, dict):
            return node
        return {key: kept(value, (*place, key)) for key, value in node.items() if not why_gone((*place, key))}

    return dict(kept(tree, ()))


def _fits(place: list[str], gone: list[str]) -> bool:
    return len(place) == len(gone) and all(there in (here, "NAME") for here, there in zip(place, gone, strict=True))
