"""What to say about an unknown key: the field that was meant, wherever in the tree it belongs, or why there is none."""

import difflib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from schemas.config.run import RunConfig
from schemas.hints.foreign_names import NOTHING, OURS

_MOST_PLACES = 3


def hint_for(location: Sequence[Any]) -> str:
    """The hint for the unknown key at the end of `location`, a path such as ("stages", 0, "bf16")."""
    key, here = str(location[-1]), keys_at(location[:-1])
    if key in OURS:
        return f"here it is {OURS[key]}"
    # In model.lora, alpha is lora_alpha and not promotion.alpha.
    if longer := [name for name in here if name.endswith(f"_{key}")]:
        return f"did you mean {longer[0]}?"
    if places := places_of(key):
        return f"it belongs to {_shown(places)}"
    if key in NOTHING:
        return f"it has no equivalent: {NOTHING[key]}"
    near = difflib.get_close_matches(key, here, n=1, cutoff=0.5)
    elsewhere = difflib.get_close_matches(key, all_fields(), n=1, cutoff=0.8)
    if elsewhere and (not near or _alike(key, elsewhere[0]) > _alike(key, near[0])):
        return f"did you mean {_shown(places_of(elsewhere[0]))}?"
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(here)}"


def _alike(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def hint_for_value(location: Sequence[Any], value: object) -> str:
    """What to write instead of a value that TRL accepts for the field at `location` and we do not; empty for any other value."""
    field = str(location[-1]) if location else ""
    if field == "max_steps" and isinstance(value, int) and value <= 0:
        return "leave max_steps out: num_train_epochs then decides"
    if field == "scale_rewards" and isinstance(value, bool):
        return "scale_rewards: group" if value else "scale_rewards: none"
    if field == "warmup_steps" and isinstance(value, float) and 0 < value < 1:
        return f"warmup_ratio: {value}"
    if field == "top_k" and value in (-1, None):
        return "top_k: 0"
    return ""


def keys_at(location: Sequence[Any]) -> list[str]:
    """The fields of the section at `location`; empty when it is no section."""
    model: type[BaseModel] | None = RunConfig
    for part in location:
        if isinstance(part, str) and model is not None and part in model.model_fields:
            model = section_in(model.model_fields[part].annotation)[0]
    return list(model.model_fields) if model is not None else []


def places_of(field: str) -> list[str]:
    """Where in the tree a field or a section of this name stands, for example stages[].learning_rate."""
    # Sections near the root first: a setting of the run is meant more often than one deep inside a reward.
    return sorted(all_fields().get(field, []), key=lambda place: place.count("."))


@cache
def all_fields() -> dict[str, list[str]]:
    """Every field and section of the config -> its dotted places."""
    found: dict[str, list[str]] = {}
    for place in _walk(RunConfig, ""):
        found.setdefault(place.rpartition(".")[2].removesuffix("[]"), []).append(place)
    return found


def _walk(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        inner, marker = section_in(field.annotation)
        if inner is not None:
            yield from _walk(inner, f"{prefix}{name}{marker}.")


def section_in(annotation: Any, marker: str = "") -> tuple[type[BaseModel] | None, str]:
    """The section that a field holds, and how a place names one of several: [] in a list, .NAME in a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, marker
    marker = {"list": "[]", "dict": ".NAME"}.get(getattr(get_origin(annotation), "__name__", ""), marker)
    for argument in get_args(annotation):
        inner, found = section_in(argument, marker)
        if inner is not None:
            return inner, found
    return None, marker


def _shown(places: list[str]) -> str:
    more = f" (and {len(places) - _MOST_PLACES} more)" if len(places) > _MOST_PLACES else ""
    return " or ".join(places[:_MOST_PLACES]) + more
