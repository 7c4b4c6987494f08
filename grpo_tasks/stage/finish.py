"""What a stage leaves behind: tables of completions, trained weights, and last the result."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.hashes import file_sha256, folder_sha256
from grpo_tasks.kit.files import replacing
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.load import save_trained, trained_weights
from grpo_tasks.stage.journal import Counters, Journal
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.metrics import EVAL_REWARD
from schemas.results.model import StageResult

RESULT_WINDOW = 10
"""The figures of a finished stage are means over so many updates."""


def write_completions(directory: StageDir, step: int, table: pa.Table) -> None:
    """Write the table of an update's completions; readers never see an incomplete file."""
    path = directory.completions(step)
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as unfinished:
        pq.write_table(table, unfinished)


def restore_best(directory: StageDir) -> None:
    """Make the best weights the final ones."""
    with replacing(directory.final) as unfinished:
        shutil.copytree(directory.best, unfinished)


def save_weights(target: Path, model: CausalLM, tokenizer: PreTrainedTokenizerBase, *, writes: bool = True) -> None:
    """Write the present weights into a folder of the stage; all ranks call this and one writes."""
    weights = trained_weights(model)
    if not writes:
        return
    with replacing(target) as unfinished:
        save_trained(model, tokenizer, unfinished, weights)


def best_step(journal: Journal, last: int) -> int | None:
    """The first update up to `last` with the highest eval_reward; None before the first held-out evaluation."""
    evaluated = [
        (metrics[EVAL_REWARD], -step) for step, metrics in journal.steps.items() if EVAL_REWARD in metrics and step <= last
    ]
    return -max(evaluated)[1] if evaluated else None


def finished(
    directory: StageDir, spec: StageSpec, journal: Journal, counters: Counters, *, stopped: str, best_step: int | None = None
) -> StageResult:
    """The result of a stage whose trained weights are written; `best_step` is None where they are the last ones."""
    adapter, step = spec.model.lora is not None, counters.step
    weights = {"adapter": directory.final} if adapter else {"path": str(directory.final), "revision": None, "adapter": None}
    model = spec.start.model_copy(update={**weights, "sha256": folder_sha256(directory.final)})
    last = range(max(1, step - RESULT_WINDOW + 1), step + 1)
    names = sorted({name for update in last for name in journal.steps.get(update, {})})
    windows = {name: journal.window(name, last=step, size=RESULT_WINDOW) for name in names}
    return StageResult(
        key=spec.key,
        directory=directory.root,
        seconds=counters.seconds,
        stage=spec.stage.name,
        model=model,
        sha256=file_sha256(directory.final / ("adapter_model.safetensors" if adapter else "model.safetensors")),
        steps=step,
        stopped=stopped,
        best_step=best_step,
        resumed=counters.resumed,
        metrics={name: sum(values) / len(values) for name, values in windows.items()},
    )
