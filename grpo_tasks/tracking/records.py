"""What of a result MLflow gets, from the folder of its step alone. Each function can be repeated (see handle.py).

result  -> FOLDERS -> artifacts      -> figures_of -> metrics      then the tables, texts and tags that its kind has
"""

import warnings
from pathlib import Path
from typing import Any

import mlflow
import polars as pl
from mlflow import MlflowClient
from mlflow.data.polars_dataset import from_polars
from mlflow.entities import AssessmentSource, Dataset, DatasetInput, InputTag, NoOpSpan

from grpo_tasks.content.conversations import turn_by_turn
from grpo_tasks.content.markdown import as_markdown
from grpo_tasks.content.modules import own_sources
from grpo_tasks.processes.child import LOG, RESULT
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.tracking.entities import record_held_out
from grpo_tasks.tracking.handle import RunHandle
from grpo_tasks.tracking.journal import FINAL, JournalShipper
from grpo_tasks.tracking.models import ADAPTER
from grpo_tasks.tracking.texts import describe_decision, merged_figures
from schemas.config.run import RunConfig
from schemas.metrics import GUARD_CHANGE, GUARD_PASSED, REWARD, member
from schemas.results.base import StepResult
from schemas.results.data import DataReport, GuardData, LabReport, PreparedData
from schemas.results.evaluation import DifficultyReport, EvalReport, Interval, guard_sections
from schemas.results.model import MergeProof, StageResult
from schemas.results.publication import Publication, ReportResult
from schemas.secret import hide

REPORT, QUARANTINE = "report.md", "quarantine.parquet"
_DIGEST_CHARS = 36
"""MLflow takes no longer digest of a data set; the tag grpo.data_digest has the complete one."""
_LARGEST_TABLE = 256 * 2**20
"""Bytes of a table of training rows that is uploaded. A larger one stays where it is; the data set input has its digest."""
FOLDERS: dict[type[StepResult], tuple[str, tuple[str, ...]]] = {
    PreparedData: ("data", ()),
    DataReport: ("data", (REPORT, QUARANTINE, "eval.parquet", "train.parquet")),
    GuardData: ("guards/{label}", (REPORT, QUARANTINE, "eval.parquet")),
    LabReport: ("lab", (REPORT, "probes.parquet", "samples.parquet")),
    DifficultyReport: ("difficulty/{label}", (REPORT, "pass_rates.parquet")),
    EvalReport: ("evaluation/{label}", (REPORT, "samples.parquet")),
    MergeProof: ("merge", ()),
    Publication: ("publication", ()),
    ReportResult: ("report", ("report.html", REPORT)),
}
"""Folder of artifacts of a kind of result, and the files that go there if they exist. Others: STEP, its report and outputs."""
_LOG_BYTES = 4 * 2**20
_TABLE_ROWS = 500
MAX_TRACES = 12
LABELS = ("base", "merged")
"""Evaluations that become traces."""
_SOURCE = AssessmentSource(source_type="CODE", source_id="grpo-pipeline")
_SAMPLE_TAG = "grpo.sample"
_TRACE_CHARS = 4_000
_VERDICTS = {"correct": "correct", "format": "strict_format", "reward": REWARD}
"""By name of the feedback: the column of the samples that it shows."""
_MIN_ROWS = 8
"""Rows of each completions file that the table shows at least: one group of eight."""


def record(run: RunHandle, config: RunConfig, result: StepResult, data: DataReport | None) -> None:
    """Everything of a result of the parent run but its log; `data` is the data of the run, if it is known."""
    at = made_at(result, run)
    other = (result.directory.parent.name, (REPORT, *result.OUTPUTS))
    folder, names = FOLDERS.get(type(result), other)
    folder = folder.format(label=getattr(result, "label", ""))
    _upload(run, result.directory, names, folder)
    run.metrics(figures_of(result, folder), timestamp_ms=at)
    match result:
        case PreparedData():
            run.text(result.model_dump_json(indent=2), "data/sources.json")
        case DataReport() if not isinstance(result, GuardData):
            _record_inputs(run, result)
            record_held_out(run, config.name, result)
        case LabReport():
            _show(run, result.directory / "probes.parquet", "lab/probes.json")
        case EvalReport():
            if result.label == "merged":
                run.metrics(merged_figures(result.metrics), timestamp_ms=at)
            if result.samples.exists():
                run.table(_judged(result.samples, data), f"{folder}/samples.json")
            _record_traces(run, result, data, timestamp_ms=at)
        case MergeProof():
            # publishing.py logs the model itself.
            run.text(result.model_dump_json(indent=2), "merge/proof.json")
        case Publication():
            run.text(result.model_dump_json(indent=2), "publication/decision.json")
            describe_decision(run, result)
            if result.guards:
                run.text(as_markdown(guard_sections(result.guards)), "guards/report.md")
            changes = {member(GUARD_CHANGE, guard.name): guard.change for guard in result.guards}
            passed = {member(GUARD_PASSED, guard.name): float(guard.passed) for guard in result.guards}
            run.metrics(changes | passed, timestamp_ms=at)
            worse = [one.model_dump() | {"guard": guard.name} for guard in result.guards for one in guard.worse]
            if worse:
                run.table(pl.DataFrame(worse), "guards/worse.json")


def _record_inputs(run: RunHandle, data: DataReport) -> None:
    """Both sides of the data as inputs of the run. Their digest is the shortened one of all accepted rows."""
    inputs = []
    for name, path, context in (("train", data.train, "training"), ("eval", data.eval, "evaluation")):
        with warnings.catch_warnings():
            # mlflow warns that a path "can be interpreted in multiple ways: LocalArtifactDatasetSource, LocalArtifact...".
            warnings.simplefilter("ignore", UserWarning)
            rows, digest = pl.read_parquet(path), data.digest[:_DIGEST_CHARS]
            made = from_polars(rows, source=str(path), targets="answer", name=name, digest=digest)
        inputs.append(DatasetInput(Dataset(**made.to_dict()), [InputTag("mlflow.data.context", context)]))
    run.store.call(lambda client: client.log_inputs(run.run_id, datasets=inputs))
    # Twelve characters are enough to tell two data sets apart in a list.
    run.tags({"grpo.data_digest": data.digest, "data": data.digest[:12]})


def figures_of(result: StepResult, folder: str) -> dict[str, float]:
    """The metrics FOLDER/NAME, those of an evaluation LABEL/NAME. An interval has its bounds as NAME_low and NAME_high."""
    figures: dict[str, float | Interval] = {}
    match result:
        case PreparedData():
            figures = {"rows_read": result.rows}
        case GuardData() | Publication() | ReportResult():
            pass
        case DataReport():
            figures = {name: getattr(result, name) for name in ("rows", "quarantined", "train_rows", "eval_rows")}
            figures["longest_prompt_tokens"] = result.prompt_tokens.max
        case LabReport():
            figures = {"failed_checks": len(result.failures)}
            for one in result.forecasts:
                names = ("share_with_signal", "mean_reward", "mean_reward_std")
                figures |= {f"{one.stage}/{name}": getattr(one, name) for name in names}
        case DifficultyReport():
            for stage in result.stages:
                known = {"never_solved": stage.never_solved, "always_solved": stage.always_solved, "mean_pass_rate": stage.mean}
                figures |= {f"{stage.stage}/{name}": value for name, value in known.items() if value is not None}
        case EvalReport():
            figures = {**result.metrics, **{f"pass_at_{k}": interval for k, interval in result.pass_at_k.items()}}
        case _:
            numbers = result.model_dump(exclude=None if isinstance(result, MergeProof) else {"seconds"})
            figures = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
    prefix, metrics = folder.removeprefix("evaluation/"), dict[str, float]()
    for name, value in figures.items():
        bounds = {"": value.value, "_low": value.low, "_high": value.high} if isinstance(value, Interval) else {"": value}
        metrics |= {f"{prefix}/{name}{end}": bound for end, bound in bounds.items()}
    return metrics


def record_stage(run: RunHandle, result: StageResult) -> None:
    """Everything of a stage into its child run: journal, completions, adapter, plots, final figures."""
    stage = StageDir(result.directory)
    JournalShipper(run.store, result.directory, lambda: run).finish()
    completions = stage.completions(0).parent
    run.files(completions, "completions")
    if files := sorted(completions.glob("*.parquet")):
        # The first rows of every file in one table; the Parquet files have the rest.
        rows = max(_TABLE_ROWS // len(files), _MIN_ROWS)
        first = pl.concat([pl.read_parquet(file, n_rows=rows) for file in files], how="diagonal_relaxed")
        run.table(turn_by_turn(first), "completions.json")
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


def _record_traces(run: RunHandle, result: EvalReport, data: DataReport | None, *, timestamp_ms: int) -> None:
    """Log completions of the same first prompts for each model as traces, once each, with their verdicts."""
    if result.label not in LABELS or data is None or not (result.samples.exists() and data.eval.exists()):
        return
    first = pl.col("sample") == pl.col("sample").min().over("prompt_id")
    samples = pl.read_parquet(result.samples).filter(first).unique("prompt_id", keep="first", maintain_order=True)
    prompts = pl.read_parquet(data.eval, columns=["prompt_id", "prompt", "answer"]).unique("prompt_id", keep="first")
    rows = turn_by_turn(samples.head(MAX_TRACES)).join(prompts, on="prompt_id", how="inner", maintain_order="left")

    def log_missing(client: MlflowClient) -> None:
        mine = f"metadata.`mlflow.sourceRun` = '{run.run_id}'"
        found = client.search_traces(locations=[run.experiment_id], filter_string=mine, max_results=500)
        known = {trace.info.tags.get(_SAMPLE_TAG): trace for trace in found}
        for row in rows.iter_rows(named=True):
            name = f"{result.label}/{row['prompt_id']}/{row['sample']}"
            trace = known.get(name)
            trace_id = trace.info.trace_id if trace else _log(run, result.label, name, row, timestamp_ms)
            if trace_id is None:
                return
            judged = {assessment.name for assessment in trace.info.assessments} if trace else set()
            for verdict, column in _VERDICTS.items():
                if row.get(column) is not None and verdict not in judged:
                    mlflow.log_feedback(trace_id=trace_id, name=verdict, value=row[column], source=_SOURCE)
            if row["answer"] is not None and "expected_response" not in judged:
                mlflow.log_expectation(trace_id=trace_id, name="expected_response", value=row["answer"], source=_SOURCE)

    # Traces know no other store than mlflow's global one.
    run.store.call_globally(log_missing)


def _log(run: RunHandle, label: str, name: str, row: dict[str, Any], timestamp_ms: int) -> str | None:
    """Id of the new trace; None where the user has switched tracing off."""
    at_ns = timestamp_ms * 1_000_000
    span = mlflow.start_span_no_context(
        label,
        inputs={"messages": [{**message, "content": message["content"][:_TRACE_CHARS]} for message in row["prompt"]]},
        experiment_id=run.experiment_id,
        tags={_SAMPLE_TAG: name},
        metadata={"mlflow.sourceRun": run.run_id},
        start_time_ns=at_ns,
    )
    if isinstance(span, NoOpSpan):
        return None
    span.end(outputs={"role": "assistant", "content": row["completion"][:_TRACE_CHARS]}, end_time_ns=at_ns)
    return str(span.trace_id)


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


def made_at(result: StepResult, run: RunHandle) -> int:
    """When the result was written, in ms. It is the same for every upload, so that a repeated upload writes the same rows."""
    written = result.directory / RESULT
    return int(written.stat().st_mtime * 1000) if written.exists() else run.started_ms


def _upload(run: RunHandle, directory: Path, names: tuple[str, ...], folder: str | None) -> None:
    for name in names:
        path = directory / name
        if path.is_dir():
            run.files(path, f"{folder}/{name}")
        elif path.exists() and (name != "train.parquet" or path.stat().st_size <= _LARGEST_TABLE):
            run.file(path, folder)


def _show(run: RunHandle, parquet: Path, name: str) -> None:
    if parquet.exists():
        run.table(pl.read_parquet(parquet, n_rows=_TABLE_ROWS), name)
