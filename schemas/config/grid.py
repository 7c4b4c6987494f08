"""The runs of a sweep: every combination of the values of some settings, with every seed.

    --over stages.0.learning_rate=1e-5,5e-6 --over stages.1.num_generations=4,8 --seeds 3   ->   2 x 2 x 3 configs

Every fault of every value is reported at once, before anything runs. A value is YAML, as for `--set`; commas inside brackets,
braces and quotes belong to it. All combinations of the first seed come first: they are what the others are compared with.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, shorten

MAX_RUNS = 1_000
NO_EFFECT = ("name", "tracking", "resources", "promotion")
"""Settings that change neither a trained model nor its evaluation."""
EVALUATIONS = 4
"""Held-out evaluations of a stage whose config has none, at equal distances."""
EVAL_STEPS_BY_EPOCHS = 50
"""Updates between evaluations of a stage whose length is given in epochs."""
_EXAMPLE = "--over stages.0.learning_rate=1e-5,5e-6"
_SHOWN = 120


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting and its values, as they were given."""

    path: str
    values: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> "Axis":
        """Read `PATH=VALUE,VALUE`; `ConfigError` for another form, or a value that occurs twice."""
        path, equals, values = text.partition("=")
        path = path.strip()
        if not equals or not path:
            raise ConfigError(f"--over {shorten(text, _SHOWN)} has no values", place="--over", fix=_EXAMPLE)
        parts = [part.strip() for part in _split(values)]
        if not all(parts):
            raise ConfigError("an empty value", place=f"--over {path}", fix="write null to leave a setting empty")
        twice = sorted({part for part in parts if parts.count(part) > 1})
        if twice:
            raise ConfigError(f"{twice[0]} is given twice", place=f"--over {path}", fix="name each value once")
        return cls(path, tuple(parts))


def _split(text: str) -> list[str]:
    """Split at the commas that are outside of brackets, braces and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "," and depth == 0:
            parts.append("")
            continue
        depth += (letter in "[{") - (letter in "]}") if not quote else 0
        parts[-1] += letter
    return parts


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of the grid."""

    number: int
    """From 1."""
    settings: dict[str, str]
    """Path -> value, for every axis."""
    label: str
    """The same in a few words, with the seed."""
    config: RunConfig

    @property
    def family(self) -> str:
        """Runs of one family have held-out rewards that mean the same."""
        config = self.config
        parts: list[Any] = [config.data, config.validation, config.completion, config.rewards]
        stages = [[stage.name, stage.rewards, stage.num_eval_prompts] for stage in config.stages]
        sampling = config.rollout.model_dump(mode="json", include={"max_completion_length", "chat_template_kwargs"})
        return _digest([*(part.model_dump(mode="json") for part in parts), stages, sampling])


@dataclass(frozen=True, slots=True)
class Grid:
    """All runs of a sweep."""

    source: str
    overrides: tuple[str, ...]
    """Settings of every run, with the evaluations that the sweep added."""
    added: tuple[str, ...]
    axes: list[Axis]
    seeds: int
    base: RunConfig
    """The config without the values of the axes."""
    variants: tuple[Variant, ...]

    def settings_of(self, number: int) -> list[str]:
        """What `--set` needs to get the config of a run."""
        variant = self.variants[number - 1]
        settings = variant.settings | {"seed": str(variant.config.seed)}
        return [*self.overrides, *(f"{path}={value}" for path, value in settings.items())]


def make_grid(source: str, overrides: Sequence[str], over: Sequence[str], *, seeds: int) -> Grid:
    """The runs of a sweep, each with its checked config.

    `overrides` are settings of every run, each as key.path=value, `over` those to vary, each as key.path=value,value. `seeds`
    counts that of the config and those that follow it. `ConfigError` lists every fault of every value, or says why there is
    nothing to compare.
    """
    base = load_config(source, list(overrides))
    axes, faults = _axes(over, seeds)
    added = _evaluations(base, axes)
    given = [*overrides, *added]
    for axis in axes:
        for value in axis.values:
            try:
                load_config(source, [*given, f"{axis.path}={value}"])
            except ConfigError as error:
                message, fix = error.message.replace("\n", "; "), f"; fix: {error.fix}" if error.fix else ""
                faults.append(f"--over {axis.path}={shorten(value, _SHOWN)}: {message}{fix}")
    if faults:
        raise ConfigError("\n".join(faults), place="--over", fix="correct these values; grpo fields lists the settings")
    runs = seeds * math.prod(len(axis.values) for axis in axes)
    if runs > MAX_RUNS:
        raise ConfigError(f"the grid has {runs:,} runs; {MAX_RUNS:,} is the limit", place="--over", fix="name fewer values")
    return Grid(source, tuple(given), tuple(added), axes, seeds, base, _variants(source, given, axes, seeds, base.seed))


def _axes(over: Sequence[str], seeds: int) -> tuple[list[Axis], list[str]]:
    """The axes that can be read and vary something, and what is wrong with the others."""
    axes: list[Axis] = []
    faults: list[str] = []
    for text in over:
        try:
            axis = Axis.of(text)
        except ConfigError as error:
            faults.append(f"{error.place}: {error.message}; fix: {error.fix}")
            continue
        if any(axis.path == other.path for other in axes):
            faults.append(f"--over {axis.path}: given twice; fix: name all its values at once")
        elif axis.path.split(".")[0] in NO_EFFECT:
            faults.append(f"--over {axis.path}: it changes no trained model; fix: --set {axis.path}=VALUE")
        elif axis.path == "seed" and seeds > 1:
            faults.append("--over seed: --seeds chooses the seeds too; fix: leave one of them out")
        else:
            axes.append(axis)
    if not 1 <= seeds <= MAX_RUNS:
        faults.append(f"--seeds {seeds}: fix: a number from 1 to {MAX_RUNS:,}")
    elif not over and seeds == 1:
        faults.append(f"one run is no sweep; fix: {_EXAMPLE}, or --seeds 3")
    return axes, faults


def _evaluations(base: RunConfig, axes: Sequence[Axis]) -> list[str]:
    """Held-out evaluations for the stages that have none: without them there is nothing to prune by.

    They are added whether or not runs are pruned, because the same runs have to be found again.
    """
    varied = {axis.path for axis in axes}
    added = []
    for index, stage in enumerate(base.stages):
        path = f"stages.{index}.eval_steps"
        if stage.eval_steps is None and stage.engine == "native" and path not in varied:
            every = max(1, stage.max_steps // EVALUATIONS) if stage.max_steps else EVAL_STEPS_BY_EPOCHS
            added.append(f"{path}={every}")
    return added


def _variants(source: str, given: list[str], axes: Sequence[Axis], seeds: int, first_seed: int) -> tuple[Variant, ...]:
    names, faults, variants = short_names([axis.path for axis in axes]), [], []
    combinations = itertools.product(range(first_seed, first_seed + seeds), *(axis.values for axis in axes))
    for number, (seed, *values) in enumerate(combinations, start=1):
        settings = {axis.path: str(value) for axis, value in zip(axes, values, strict=True)}
        sets = [f"{path}={value}" for path, value in settings.items()]
        labels = [f"{names[path]} {value}" for path, value in settings.items()]
        # A seed that is an axis of its own stays.
        if "seed" not in settings:
            sets.append(f"seed={seed}")
            labels.append(f"seed {seed}")
        try:
            variants.append(Variant(number, settings, ", ".join(labels), load_config(source, [*given, *sets])))
        except ConfigError as error:
            faults.append(f"{', '.join(labels)}: {error.message}")
    if faults:
        raise ConfigError(
            "\n".join(faults), place="--over", fix="each value is valid alone; leave out the values that exclude each other"
        )
    seen: dict[str, Variant] = {}
    for variant in variants:
        content = _digest(variant.config.model_dump(mode="json", exclude=set(NO_EFFECT)))
        if content in seen:
            raise ConfigError(
                f"two runs are the same: {seen[content].label} and {variant.label}",
                place="--over",
                fix="leave out a value that means the same as another",
            )
        seen[content] = variant
    return tuple(variants)


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """The last part of each path, or the whole path where two paths end alike."""
    lasts = [path.rpartition(".")[2] for path in paths]
    return {path: last if lasts.count(last) == 1 else path for path, last in zip(paths, lasts, strict=True)}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
