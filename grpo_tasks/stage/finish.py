"""What a stage leaves: tables of completions, trained weights, and last the result."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_tasks.content.hashes import file_sha256, folder_sha256
from grpo_tasks.policy.load import save_trained, trained_weights
from grpo_tasks.stage.journal import Journal
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.metrics import describe
from schemas.results import StageResult

BEST_METRIC = "eval_reward"
RESULT_WINDOW = 10
"""Updates the figures of a finished stage are means of."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a stage came to its end."""

    step: int
    stopped: str
    """max_steps, target or plateau."""
    resumed: int
    """Times it was taken up from a checkpoint."""
    seconds: float
    best_step: int | None = None
    """The update whose weights are the result, when it was not the last one."""


def write_completions(directory: StageDir, step: int, table: pl.DataFrame) -> None:
    """Write the table of an update's completions, in one move."""
    path = directory.completions(step)
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    table.write_parquet(part)
    part.replace(path)


def save_final(directory: StageDir, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, writes: bool = True) -> None:
    """Write the trained weights; of several processes all call it and one writes."""
    _save(directory.final, model, tokenizer, writes=writes)


def save_best(directory: StageDir, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, writes: bool = True) -> None:
    """Keep the present weights as the best so far."""
    _save(directory.best, model, tokenizer, writes=writes)


def take_best(directory: StageDir) -> None:
    """Make the best weights the final ones."""
    part = directory.final.with_name(f".part-{directory.final.name}")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(directory.best, part)
    shutil.rmtree(directory.final, ignore_errors=True)
    part.rename(directory.final)


def _save(target: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, writes: bool) -> None:
    weights = trained_weights(model)
    if not writes:
        return
    part = target.with_name(f".part-{target.name}")
    shutil.rmtree(part, ignore_errors=True)
    save_trained(model, tokenizer, part, weights)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)


def best_step(journal: Journal, last: int) -> int | None:
    """The first update up to `last` with the highest eval_reward; None when there was no look at held-out prompts."""
    looks = [(metrics[BEST_METRIC], -step) for step, metrics in journal.steps.items() if BEST_METRIC in metrics and step <= last]
    return -max(looks)[1] if looks else None


def on_plateau(spec: StageSpec, journal: Journal, step: int) -> bool:
    """Whether so many looks as `early_stopping_patience` says brought nothing better."""
    best, patience = best_step(journal, step), spec.stage.early_stopping_patience
    if patience is None or best is None:
        return False
    return sum(BEST_METRIC in journal.steps[later] for later in range(best + 1, step + 1)) >= patience


def finished(directory: StageDir, spec: StageSpec, journal: Journal, ending: Ending) -> StageResult:
    """The result of a stage whose trained weights are written."""
    adapter = spec.model.lora is not None
    place = {"adapter": directory.final} if adapter else {"path": str(directory.final), "revision": None, "adapter": None}
    model = spec.start.model_copy(update={**place, "sha256": folder_sha256(directory.final)})
    last = range(max(1, ending.step - RESULT_WINDOW + 1), ending.step + 1)
    names = sorted({name for step in last for name in journal.steps.get(step, {})})
    windows = {name: journal.window(name, last=ending.step, size=RESULT_WINDOW) for name in names}
    return StageResult(
        key=spec.key,
        directory=directory.root,
        seconds=ending.seconds,
        stage=spec.stage.name,
        model=model,
        sha256=file_sha256(directory.final / ("adapter_model.safetensors" if adapter else "model.safetensors")),
        steps=ending.step,
        stopped=ending.stopped,
        best_step=ending.best_step,
        resumed=ending.resumed,
        metrics={name: sum(values) / len(values) for name, values in windows.items()},
    )


def target_reached(spec: StageSpec, journal: Journal, step: int) -> bool:
    """Whether the stage's `early_stop` says that it is over."""
    rule = spec.stage.early_stop
    if rule is None or step < rule.min_steps:
        return False
    values = journal.window(rule.metric, last=step, size=rule.window)
    if len(values) < rule.window:
        return False
    mean, metric = sum(values) / len(values), describe(rule.metric)
    lower_is_better = metric is not None and metric.better == "lower"
    return mean <= rule.target if lower_is_better else mean >= rule.target
