"""What each kind of result becomes in MLflow: one function per kind, which reads the result's folder only.

    PreparedData, DataReport -> data/     LabReport -> lab/       StageResult -> the stage's child run
    DifficultyReport -> difficulty/LABEL/
    EvalReport -> LABEL/METRIC            MergeProof -> merge/    Publication -> publication/
    ReportResult -> report/               any other -> STEP/

Each function can be repeated (see handle.py). What this module does not do: decide whether to record; runs.py does.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import polars as pl
from mlflow.data.polars_dataset import from_polars
from mlflow.entities import Dataset, DatasetInput, InputTag

from grpo_tasks.content.conversations import turn_by_turn
from grpo_tasks.content.modules import own_sources
from grpo_tasks.processes.entry import LOG, RESULT
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.tracking.handle import RunHandle
from grpo_tasks.tracking.journal import FINAL, JournalShipper
from grpo_tasks.tracking.models import ADAPTER
from grpo_tasks.tracking.shown.headline import data_tag, describe_decision, guards_markdown, merged_figures
from schemas.config.run import RunConfig
from schemas.metrics import GUARD_CHANGE, GUARD_PASSED, member
from schemas.results.base import StepResult
from schemas.results.data import DataReport, GuardData, PreparedData
from schemas.results.difficulty import DifficultyReport
from schemas.results.evaluation import EvalReport, Interval
from schemas.results.lab import LabReport
from schemas.results.model import MergeProof, StageResult
from schemas.results.publication import Publication, ReportResult
from schemas.secret import hide

REPORT = "report.md"
_DIGEST_CHARS = 36
"""MLflow takes no longer digest of a data set; the tag grpo.data_digest has the complete one."""
_LARGEST_TABLE = 256 * 2**20
"""Bytes of a table of training rows that is uploaded. A larger one stays where it is; the data set input has its digest."""
_LOG_BYTES = 4 * 2**20
"""Bytes of a log that are uploaded: its end."""
_TABLE_ROWS = 500
_MIN_ROWS = 8
"""Rows of each completions file that the table shows at least: one group of eight."""


def record_prepared(run: RunHandle, result: PreparedData) -> None:
    """The files that were read as data/sources.json, and the number of rows."""
    run.text(result.model_dump_json(indent=2), "data/sources.json")
    run.metrics({"data/rows_read": result.rows}, timestamp_ms=made_at(result, run))


def record_data(run: RunHandle, result: DataReport) -> None:
    """Training and held-out rows as data set inputs with the content digest; report and quarantine as files; counts."""
    sides = {"train": (result.train, "training"), "eval": (result.eval, "evaluation")}
    inputs = [_dataset(path, name, context, result.digest) for name, (path, context) in sides.items()]
    run.wake()
    run.store.ask(lambda client: client.log_inputs(run.run_id, datasets=inputs))
    run.tags({"grpo.data_digest": result.digest, "data": data_tag(result.digest)})
    _upload(run, result.directory, (REPORT, "quarantine.parquet", result.eval.name), "data")
    if result.train.stat().st_size <= _LARGEST_TABLE:
        run.file(result.train, "data")
    counts = {
        "rows": result.rows,
        "quarantined": result.quarantined,
        "train_rows": result.train_rows,
        "eval_rows": result.eval_rows,
        "longest_prompt_tokens": result.prompt_tokens.max,
    }
    run.metrics({f"data/{name}": value for name, value in counts.items()}, timestamp_ms=made_at(result, run))


def _dataset(path: Path, name: str, context: str, digest: str) -> DatasetInput:
    frame = pl.read_parquet(path)
    with warnings.catch_warnings():
        # mlflow warns that a path "can be interpreted in multiple ways: LocalArtifactDatasetSource, LocalArtifactDatasetSource".
        warnings.simplefilter("ignore", UserWarning)
        dataset = from_polars(frame, source=str(path), targets="answer", name=name, digest=digest[:_DIGEST_CHARS])
    return DatasetInput(Dataset(**dataset.to_dict()), [InputTag("mlflow.data.context", context)])


def record_guard_data(run: RunHandle, result: GuardData) -> None:
    """Prompts and report of a guard of the promotion. They are no data of the model, so no data set input and no digest."""
    _upload(run, result.directory, (REPORT, "quarantine.parquet", result.eval.name), f"guards/{result.label}")


def record_lab(run: RunHandle, result: LabReport) -> None:
    """The report, every probe as a table row, the forecasts as metrics."""
    _upload(run, result.directory, (REPORT, "probes.parquet", "samples.parquet"), "lab")
    _show(run, result.directory / "probes.parquet", "lab/probes.json")
    figures: dict[str, float] = {"lab/failed_checks": len(result.failures)}
    for forecast in result.forecasts:
        figures[f"lab/{forecast.stage}/share_with_signal"] = forecast.share_with_signal
        figures[f"lab/{forecast.stage}/mean_reward"] = forecast.mean_reward
        figures[f"lab/{forecast.stage}/mean_reward_std"] = forecast.mean_reward_std
    run.metrics(figures, timestamp_ms=made_at(result, run))


def record_difficulty(run: RunHandle, result: DifficultyReport) -> None:
    """The report and the pass rates; the mean and the counts of each stage as metrics difficulty/LABEL/STAGE/..."""
    folder = f"difficulty/{result.label}"
    _upload(run, result.directory, (REPORT, result.pass_rates.name), folder)
    figures: dict[str, float] = {}
    for stage in result.stages:
        name = f"{folder}/{stage.stage}"
        figures |= {f"{name}/never_solved": stage.never_solved, f"{name}/always_solved": stage.always_solved}
        if stage.mean is not None:
            figures |= interval_metrics({f"{name}/mean_pass_rate": stage.mean})
    run.metrics(figures, timestamp_ms=made_at(result, run))


def record_stage(run: RunHandle, result: StageResult) -> None:
    """Everything of a stage into its child run: journal, completions, adapter, plots, final figures."""
    stage = StageDir(result.directory)
    JournalShipper(run.store, result.directory, lambda: run).finish()
    run.files(stage.completions(0).parent, "completions")
    _show_completions(run, stage.completions(0).parent)
    if (stage.final / "adapter_config.json").exists():
        # A fully fine-tuned stage leaves a complete model. It stays on disk, because the merged model is what is published.
        run.files(stage.final, ADAPTER)
    _upload(run, result.directory, (stage.spec.name, stage.journal.name, stage.events.name, stage.result.name), None)
    plots = result.directory / "plots"
    if stage.journal.exists():
        # Imported here: a run whose stages are all finished does not need matplotlib.
        from grpo_tasks.tracking.plots import plot_stage

        plot_stage(stage.journal, plots)
    run.files(plots, "plots")
    figures = {f"{FINAL}{name}": value for name, value in result.metrics.items()}
    if result.kept is not None:
        _upload(run, result.directory, (stage.train.name, stage.left_out.name), "prompts")
        _show(run, stage.left_out, "prompts/left_out.json")
        figures |= {f"prompts/{name}": value for name, value in result.kept.model_dump().items()}
    run.metrics(figures, timestamp_ms=made_at(result, run), step=result.steps)
    run.tags({"grpo.sha256": result.sha256, "grpo.stopped": result.stopped, "grpo.resumed": str(result.resumed)})


def record_evaluation(run: RunHandle, result: EvalReport, data: DataReport | None) -> None:
    """Metrics as LABEL/METRIC (interval bounds as LABEL/METRIC_low and _high), the completions and the report.

    The table that MLflow shows has question, ground truth, answer and verdict in its first columns; `data` has the first two.
    """
    figures = interval_metrics(result.metrics | {f"pass_at_{k}": interval for k, interval in result.pass_at_k.items()})
    metrics = {f"{result.label}/{name}": value for name, value in figures.items()}
    if result.label == "merged":
        metrics |= merged_figures(result.metrics)
    run.metrics(metrics, timestamp_ms=made_at(result, run))
    folder = f"evaluation/{result.label}"
    _upload(run, result.directory, (REPORT, result.samples.name), folder)
    if result.samples.exists():
        run.table(_judged(result.samples, data), f"{folder}/samples.json")


def _judged(samples: Path, data: DataReport | None) -> pl.DataFrame:
    """The first completions with their questions: what a person reads first comes first, token ids are left out."""
    rows = turn_by_turn(pl.read_parquet(samples, n_rows=_TABLE_ROWS))
    if data is not None and data.eval.exists():
        prompts = pl.read_parquet(data.eval, columns=["prompt_id", "prompt", "answer"])
        question = pl.col("prompt").list.last().struct.field("content")
        known = prompts.select("prompt_id", question.alias("question"), pl.col("answer").alias("ground_truth"))
        rows = rows.join(known.unique("prompt_id"), on="prompt_id", how="left", maintain_order="left")
    if "correct" in rows.columns:
        right = pl.when(pl.col("correct")).then(pl.lit("right")).when(pl.col("correct").not_()).then(pl.lit("wrong"))
        rows = rows.with_columns(right.alias("verdict"))
    rows = rows.rename({"completion": "model_answer"})
    first = [name for name in ("question", "ground_truth", "model_answer", "verdict") if name in rows.columns]
    return rows.select(*first, pl.exclude(*first, "token_ids") if "token_ids" in rows.columns else pl.exclude(*first))


def record_step(run: RunHandle, result: StepResult) -> None:
    """Any other result: its outputs, its report and its numbers, under the name of its step."""
    folder = result.directory.parent.name
    files = (REPORT, *result.OUTPUTS)
    for name in files:
        if (result.directory / name).is_dir():
            run.files(result.directory / name, f"{folder}/{name}")
    _upload(
        run, result.directory, tuple(name for name in (REPORT, *result.OUTPUTS) if (result.directory / name).is_file()), folder
    )
    figures = {name: value for name, value in result.model_dump(exclude={"seconds"}).items() if isinstance(value, int | float)}
    run.metrics({f"{folder}/{name}": value for name, value in figures.items()}, timestamp_ms=made_at(result, run))


def record_log(run: RunHandle, result: StepResult, step: str) -> None:
    """What the step's process printed, as logs/STEP.txt: its end if it is long, without passwords."""
    log = result.directory / LOG
    if log.exists() and log.stat().st_size:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        run.text(hide(text), f"logs/{step}.txt")


def record_sources(run: RunHandle, config: RunConfig) -> None:
    """The user's own modules and what they import: rewards/MODULE.py, evaluators/MODULE.py, interaction/MODULE.py, ..."""
    evaluators = [*config.evaluation.evaluators.values(), *(guard.evaluator or "" for guard in config.promotion.guards)]
    shown = [stage.demonstrations for stage in config.stages if stage.demonstrations is not None]
    found = [
        ("rewards", own_sources(config.rewards.references, config.rewards.module_dirs())),
        ("evaluators", own_sources(evaluators, config.rewards.module_dirs())),
        ("lab", own_sources([config.lab.gold or ""], config.rewards.module_dirs())),
        ("interaction", own_sources(config.interaction.own_code, config.interaction.module_dirs())),
        *(("demonstrations", own_sources([each.function or ""], each.module_dirs())) for each in shown),
    ]
    for kind, modules in found:
        for name, path in modules.items():
            if path.suffix == ".py":
                run.text(hide(path.read_text(encoding="utf-8", errors="replace")), f"{kind}/{name}.py")


def record_merge(run: RunHandle, result: MergeProof) -> None:
    """The proof as metrics merge/... and as JSON. publishing.py logs the model itself."""
    figures = {name: value for name, value in result.model_dump().items() if isinstance(value, int | float)}
    run.metrics({f"merge/{name}": value for name, value in figures.items()}, timestamp_ms=made_at(result, run))
    run.text(result.model_dump_json(indent=2), "merge/proof.json")


def record_publication(run: RunHandle, config: RunConfig, result: Publication) -> None:
    """The decision as tags and description, which the list of runs shows, and with its tests as JSON."""
    run.text(result.model_dump_json(indent=2), "publication/decision.json")
    describe_decision(run, config, result)
    if result.guards:
        run.text(guards_markdown(result.guards), "guards/report.md")
        figures = {member(GUARD_CHANGE, guard.name): guard.change for guard in result.guards}
        passed = {member(GUARD_PASSED, guard.name): float(guard.passed) for guard in result.guards}
        run.metrics(figures | passed, timestamp_ms=made_at(result, run))
    worse = [one.model_dump() | {"guard": guard.name} for guard in result.guards for one in guard.worse]
    if worse:
        run.table(pl.DataFrame(worse), "guards/worse.json")


def record_report(run: RunHandle, result: ReportResult) -> None:
    """The page as report/report.html, its summary as report/report.md."""
    _upload(run, result.directory, (result.html.name, REPORT), "report")


def interval_metrics(figures: Mapping[str, Interval]) -> dict[str, float]:
    """Each value under its own name, its bounds as NAME_low and NAME_high."""
    metrics: dict[str, float] = {}
    for name, interval in figures.items():
        metrics |= {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return metrics


def made_at(result: StepResult, run: RunHandle) -> int:
    """When the result was written, in ms. It is the same for every upload, so that a repeated upload writes the same rows."""
    written = result.directory / RESULT
    return int(written.stat().st_mtime * 1000) if written.exists() else run.started_ms


def _upload(run: RunHandle, directory: Path, names: tuple[str, ...], folder: str | None) -> None:
    for name in names:
        if (directory / name).exists():
            run.file(directory / name, folder)


def _show(run: RunHandle, parquet: Path, name: str) -> None:
    if parquet.exists():
        run.table(pl.read_parquet(parquet, n_rows=_TABLE_ROWS), name)


def _show_completions(run: RunHandle, directory: Path) -> None:
    """The first rows of every completions file in one table; the Parquet files have the rest."""
    files = sorted(directory.glob("*.parquet"))
    if files:
        rows = max(_TABLE_ROWS // len(files), _MIN_ROWS)
        first = pl.concat([pl.read_parquet(file, n_rows=rows) for file in files], how="diagonal_relaxed")
        run.table(turn_by_turn(first), "completions.json")
