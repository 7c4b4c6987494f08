"""Checks before the first step, while nothing heavy is loaded or hashed. Each refuses with a `UserError` that names the field."""

import importlib.util
import json
import os
import re
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_tasks.cluster.connect import cluster_address
from grpo_tasks.content.shards import PACKINGS, shards_of
from grpo_tasks.processes.child import RESULT, SPEC
from schemas.config.data import DataSource
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, DataError, ModelError
from schemas.paths import EMBEDDED, is_local, resolve, why_not_a_file
from schemas.results.model import StructureNotes, StructureSpec

_HUB_ID = re.compile(r"(?:[\w.-]{1,96}/)?[\w.-]{1,96}")
_RELATIVE = "paths are relative to the folder where grpo is called"
REGISTERED = re.compile(r"models:/.+|[^/]+@[^/]+|[^/@]+/[0-9]+")
"""Forms of a name that stand for a registered model: NAME@ALIAS, NAME/VERSION, and both with models:/ in front."""
FIRST_ROWS = 200
"""Rows that are read to find a missing column early."""
LARGE_BYTES = 64 * 2**20
STRUCTURE_S = 300.0
"""Time limit for building the model that config.json describes, without weights. It takes seconds; the hub may be slow."""
SLOW, USUAL = 1e-6, "5.0e-5"
"""Learning rates: TRL's default, and what the presets of pretrained models have (docs/stages.md#learning-rate)."""
EXTRAS = {"trl": "trl", "bitsandbytes": "gpu", "tensorboard": "tensorboard", "wandb": "wandb"}
"""Optional libraries that a config may need, and the extra that installs each."""


def check_working_directory() -> None:
    """Refuse a working directory whose name is an unresolved variable, or that Prefect deletes after the run with its results."""
    folder, temporary = Path.cwd().resolve(), Path(tempfile.gettempdir()).resolve()
    unresolved = next((part for part in folder.parts if "{{" in part), None)
    below = folder.relative_to(temporary).parts if folder.is_relative_to(temporary) else ()
    if unresolved is None and not (below and _OF_PREFECT.fullmatch(below[0])):
        return
    why = (
        f"contains the unresolved variable {unresolved}"
        if unresolved
        else "is a temporary one, which Prefect deletes after the run"
    )
    raise ConfigError(
        f"the working directory {why}: results would be lost",
        place=str(folder),
        fix="export GRPO_WORKDIR=/folder/for/runs where prefect deploy runs and where the worker runs, then deploy again; "
        "or give the work pool a working_dir; grpo up does both",
    )


_OF_PREFECT = re.compile(r"tmp\w{1,64}prefect|prefect-workspace-\S{1,200}|runner_storage")
"""Folders below the system's temporary folder in which Prefect's workers and runners execute runs."""


def check_inputs(config: RunConfig) -> None:
    """Refuse data files and a base model that do not exist or are something else. Opens no file, so a FIFO cannot block it."""
    for side in ("train", "eval"):
        for index, source in enumerate(getattr(config.data, side)):
            _check_source(source, f"data.{side}.{index}.path")
    for index, guard in enumerate(config.promotion.guards):
        for number, source in enumerate(guard.data):
            _check_source(source, f"promotion.guards.{index}.data.{number}.path")
    if not REGISTERED.fullmatch(config.model.path) or is_local(config.model.path):
        check_model(config.model.path, "model.path")
    check_start(config)
    if config.resources.cluster.engine == "ray":
        cluster_address(config.resources.cluster.address)


def check_columns(config: RunConfig) -> None:
    """Read the first rows of each data file: a missing column is refused before Prefect, MLflow and torch are imported."""
    from grpo_tasks.data.sources import load_sources

    guarded = []
    if config.promotion.guards:
        from grpo_tasks.evaluation.guards import check_guard_pattern, guard_data

        for guard in config.promotion.guards:
            check_guard_pattern(guard)
            guarded.append(guard_data(config, guard))
    for data in [config.data, *guarded]:
        for source in [*data.train, *data.eval]:
            first = shards_of(source)[0]
            path = Path(resolve(first.path))
            # A step hashes the file that it reads, and unpacks a packed one; a large one would take seconds here.
            most = LARGE_BYTES / 16 if path.suffix.lower() in PACKINGS else LARGE_BYTES
            if source.format == "hub" or not path.is_file() or path.stat().st_size > most:
                continue
            few = first.model_copy(update={"max_rows": min(source.max_rows or FIRST_ROWS, FIRST_ROWS)})
            with tempfile.TemporaryDirectory() as folder:
                load_sources(data.model_copy(update={"train": [few], "eval": []}), directory=Path(folder))


def _check_source(source: DataSource, place: str) -> None:
    path = Path(resolve(source.path))
    if source.format == "hub" and (path.is_dir() or not is_local(source.path)):
        return
    try:
        shards = shards_of(source)
    except DataError as error:
        raise ConfigError(f"{error.message}: {source.path}", place=place, fix=error.fix) from error
    if [shard.path for shard in shards] != [source.path]:
        for shard in shards:
            if reason := why_not_a_file(Path(shard.path)):
                raise ConfigError(f"{reason}: {shard.path}", place=place, fix="correct the pattern or the folder")
        return
    looks_like_a_file = source.format in ("jsonl", "csv", "parquet", "arrow") or path.suffix or source.path.startswith(EMBEDDED)
    reason = why_not_a_file(path)
    if reason and (looks_like_a_file or reason != "no such file"):
        raise ConfigError(f"{reason}: {path}", place=place, fix=_RELATIVE)


def check_model(name: str, place: str) -> None:
    """Refuse a path that is not a model folder. A name that is not on this disk is taken for a hub id."""
    path = Path(resolve(name))
    if os.path.lexists(path):
        reason = why_not_a_file(path / "config.json") if path.is_dir() else "it is not a folder"
        if reason:
            raise ConfigError(f"no model there ({reason}): {path}", place=place, fix="name a folder with config.json and weights")
    elif path.is_absolute() or name.startswith((".", EMBEDDED)) or name.count("/") > 1 or "\0" in name:
        raise ConfigError(f"no such folder: {path}", place=place, fix=f"{_RELATIVE}; a hub id is OWNER/NAME")
    elif not _HUB_ID.fullmatch(name):
        raise ConfigError(f"no such model: {name}", place=place, fix="name a folder, a registered model or a hub id (OWNER/NAME)")


def check_start(config: RunConfig, *, place: str = "start_from") -> list[str]:
    """Refuse an adapter that training cannot continue from; returns what is worth saying about it, in sentences."""
    folder = config.start_from
    if folder is None:
        return []
    weights, lora = folder / "adapter_model.safetensors", config.model.lora
    given = _adapter_settings(folder, place)
    if lora is None:
        fix = "model.lora: {}, or a merged model as model.path"
        raise ConfigError("model.lora: null trains all weights and no adapter", place=place, fix=fix)
    if not weights.is_file():
        pickled = (folder / "adapter_model.bin").exists()
        raise ModelError(
            "the adapter's weights are a pickle, and pickles are never read" if pickled else f"no such file: {weights}",
            place=place,
            fix="save the adapter with peft's save_pretrained, which writes adapter_model.safetensors",
        )
    has = {name: given.get(name, default) for name, default in (("r", None), ("lora_alpha", None), ("use_rslora", False))}
    if has != {name: getattr(lora, name) for name in has}:
        shown = ", ".join(f"{name}: {json.dumps(value)}" for name, value in has.items() if name != "use_rslora" or value)
        raise ConfigError(f"the adapter {folder} was trained with other settings", place=place, fix=f"model.lora: {{{shown}}}")
    notes, base = [], str(given.get("base_model_name_or_path"))
    if (folder / "trainer_state.json").is_file():
        notes.append(f"{folder}: only its weights are taken; optimizer, schedule and position of the data begin from zero")
    if _HUB_ID.fullmatch(base) and _HUB_ID.fullmatch(config.model.path) and "/" in base and base != config.model.path:
        notes.append(f"{folder} was trained on {base}, and model.path is {config.model.path}")
    return notes


def _adapter_settings(folder: Path, place: str) -> dict[str, Any]:
    """What adapter_config.json says; an error that names what the folder is, if it is no adapter."""
    file = folder / "adapter_config.json"
    # Unlike those of Path, these functions accept a name of any length.
    if not os.path.isfile(file):  # noqa: PTH113
        checkpoints = list(folder.glob("checkpoint-*")) if os.path.isdir(folder) else []  # noqa: PTH112
        if os.path.isfile(folder / "config.json"):  # noqa: PTH113
            why, fix = "it holds a complete model, not an adapter", f"model.path: {folder}, without start_from"
        elif checkpoints:
            newest = max(checkpoints, key=lambda path: path.stat().st_mtime_ns)
            why, fix = "it holds checkpoints", f"name one of them: {newest}"
        else:
            why, fix = "no adapter there", f"name a folder with {file.name} and adapter_model.safetensors"
        raise ModelError(f"{why}: {folder}", place=place, fix=fix)
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        kind = given["peft_type"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError("the file is damaged", place=str(file), fix="copy the folder again") from error
    if kind != "LORA":
        raise ModelError(
            f"it is an adapter of the kind {kind}, and LORA is trained here: {folder}", place=place, fix="another one"
        )
    return dict(given)


def check_learning_rates(config: RunConfig) -> list[str]:
    """What is worth saying about stages that train an adapter with TRL's default rate, which is for training all weights."""
    if config.model.lora is None:
        return []
    slow = [(number, stage) for number, stage in enumerate(config.stages) if stage.kind == "grpo" and stage.learning_rate <= SLOW]
    return [
        f"stages.{number}.learning_rate: {stage.learning_rate:g} hardly moves an adapter; fix: {USUAL}" for number, stage in slow
    ]


def check_structure(config: RunConfig, *, hub: bool) -> list[str]:
    """Compare the names of `target_modules` and the longest completion with the model, in a child process without its weights.

    A child is started only where there is something to compare: named layers, or more tokens than config.json allows; with `hub`
    also where config.json must be downloaded. Returns what is worth saying, in sentences. `ConfigError` where a name matches no
    layer or the model has too few positions, `ModelError` where it does not end being built or takes too much memory.
    """
    model, file = config.model, Path(resolve(config.model.path)) / "config.json"
    longest = config.interaction.longest_prompt(config.validation.max_prompt_length) + config.interaction.longest(config.rollout)
    named = model.lora is not None and model.lora.target_modules != "all-linear"
    if not file.is_file() and not hub:
        return []
    if file.is_file() and not named:
        with suppress(ValueError):
            settings = json.loads(file.read_text(encoding="utf-8"))
            text = settings.get("text_config", settings)
            limits = [text[name] for name in ("max_position_embeddings", "n_positions") if isinstance(text.get(name), int)]
            # Where config.json says nothing, somebody has to look closer.
            if longest <= next(iter(limits), 0):
                return []
    from grpo_tasks.processes.child import prepare_child, run_module

    # Its server serves later steps too, so its log must not be in a folder that goes away.
    prepare_child()
    ends = time.monotonic() + STRUCTURE_S

    def require_end() -> None:
        if time.monotonic() > ends:
            raise ModelError(
                f"building the model that config.json describes did not end within {STRUCTURE_S:g} s",
                place=f"model.path: {model.path}",
                fix="name another model, or correct its config.json",
            )

    spec = StructureSpec(path=model.path, revision=model.revision, lora=model.lora, longest=longest)
    with tempfile.TemporaryDirectory() as folder:
        spec.save(Path(folder) / SPEC)
        run_module("grpo_tasks.policy.structure", Path(folder), tick=require_end)
        return StructureNotes.load(Path(folder) / RESULT).notes


def check_output(config: RunConfig) -> None:
    """Refuse an output folder that is not writable, before the first step instead of after the last one."""
    folder = config.resources.output_dir / config.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"the run cannot write to {folder}: {error.strerror}",
            place="resources.output_dir",
            fix="remove what is in the way, or name another folder",
        ) from error


def check_tracking(config: RunConfig) -> None:
    """Refuse an MLflow store that does not answer or a tracker without a login, before anything is hashed or served."""
    # Here, because it imports MLflow.
    from grpo_tasks.tracking.report_to import check_reports
    from grpo_tasks.tracking.store import check_store

    check_reports(config.tracking)
    check_store(config.tracking)


def check_installed(config: RunConfig) -> None:
    """Refuse settings that need a library which is not installed; the error names the extra that installs it."""
    needed = [("model.quantization", "bitsandbytes")] if config.model.quantization != "none" else []
    needed += [("tracking.report_to", tracker) for tracker in config.tracking.report_to]
    for stage in config.stages:
        needed += [(f"stages {stage.name}: engine trl", "trl")] if stage.engine == "trl" else []
        needed += [(f"stages {stage.name}: optim {stage.optim}", "bitsandbytes")] if "8bit" in stage.optim else []
    for place, library in needed:
        if importlib.util.find_spec(library) is None:
            fix = f"pip install -c deploy/constraints.txt '.[{EXTRAS[library]}]'"
            raise ConfigError(f"{library} is not installed", place=place, fix=fix)
