"""Results that steps hand to each other and leave on disk: frozen, as JSON, never pickled.

A result says where its files are (`directory`) and which content made it (`key`). Two results with the same key come from the
same inputs and the same code. Durations are recorded but do not count in the key.
"""

import hashlib
import json
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict

from schemas.config.model import ModelConfig
from schemas.errors import DamagedError


class Result(BaseModel):
    """A frozen record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def save(self, path: Path) -> None:
        """Write as JSON, atomically: a reader never sees an incomplete file."""
        part = path.with_name(path.name + ".part")
        part.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


class OutputFile(Result):
    """One output file of a step."""

    path: str
    """Path relative to the folder of the step, with slashes."""
    bytes: int
    sha256: str


class StepResult(Result):
    """Base of the result of every step. Saved with a manifest of the step's files and a seal, it marks the step as finished."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ()
    """Files and folders that later steps read. Their contents count in the keys of those steps."""

    key: str
    """Content key of the step: a hash of its inputs and of the code it reaches."""
    directory: Path
    """Folder with the step's files."""
    seconds: float
    """Duration of the step in seconds."""
    manifest: tuple[OutputFile, ...] = ()
    """All output files. Empty until the step ends."""
    seal: str = ""
    """SHA-256 of all other fields. Empty until the step ends."""

    def sealed(self, manifest: tuple[OutputFile, ...]) -> Self:
        """The result of a finished step, with its manifest and a seal that detects a change of the saved file."""
        unsealed = self.model_copy(update={"manifest": manifest, "seal": ""})
        return unsealed.model_copy(update={"seal": unsealed._digest()})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            DamagedError: the file changed since it was written.
        """
        try:
            result = super().load(path)
        except ValueError as error:
            raise DamagedError("the result cannot be read", place=str(path)) from error
        if result.seal and result.seal != result._digest():
            raise DamagedError("the result changed since its step wrote it (the seal differs)", place=str(path))
        return result

    def moved_to(self, directory: Path) -> Self:
        """The result after its folder was moved: all paths inside the folder change with it."""
        old, new = str(self.directory), str(directory)

        def follow(value: object) -> object:
            if isinstance(value, dict):
                return {name: follow(item) for name, item in value.items()}
            if isinstance(value, list):
                return [follow(item) for item in value]
            inside = isinstance(value, str) and (value == old or value.startswith(f"{old}/"))
            return new + str(value)[len(old) :] if inside else value

        moved = type(self).model_validate(follow(json.loads(self.model_dump_json())))
        return moved.sealed(moved.manifest) if self.seal else moved

    def _digest(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"seal"}).encode()).hexdigest()


class SourceFile(Result):
    """One source of rows."""

    path: str
    """As written in the config."""
    split: Literal["train", "eval"]
    rows: int
    sha256: str
    """Hash of the bytes of the file, or of the rows of a hub data set."""


class PreparedData(StepResult):
    """All rows as read, in one table (rows.parquet, see Raw in schemas/tables.py)."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("rows.parquet",)

    sources: list[SourceFile]
    rows: int


class RuleCount(Result):
    """Number of rows that violate a row rule."""

    rule: str
    meaning: str
    rows: int


class TokenLengths(Result):
    """Prompt lengths in tokens, chat template included."""

    mean: float
    p50: int
    p95: int
    max: int
    limit: int


class DataReport(StepResult):
    """Result of validation. Files: train.parquet, eval.parquet (Prompts in schemas/tables.py), quarantine.parquet, report.md."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("train.parquet", "eval.parquet")

    rows: int
    """Number of rows read."""
    quarantined: int
    """Number of rejected rows."""
    train_rows: int
    eval_rows: int
    rules: list[RuleCount]
    prompt_tokens: TokenLengths
    digest: str
    """SHA-256 of the accepted rows of both splits, in order. It identifies the data of a model."""
    sources: list[SourceFile]
    """The sources of the rows."""

    @property
    def train(self) -> Path:
        """Accepted training rows."""
        return self.directory / "train.parquet"

    @property
    def eval(self) -> Path:
        """Accepted held-out rows."""
        return self.directory / "eval.parquet"


class LabCheck(Result):
    """One check of one reward function."""

    function: str
    check: str
    """contract, determinism, speed, order, empty, gaming, signal ..."""
    outcome: Literal["passed", "warned", "failed"]
    detail: str = ""
    """The finding, with its numbers."""
    prompt_id: str = ""
    place: str = ""
    """File and line of the row."""
    probe: str = ""
    """Kind of completion: perfect, empty, tag_stuffed ..."""
    completion: str = ""
    """The completion, shortened to 500 characters."""


class SignalForecast(Result):
    """Share of groups with a learning signal, estimated from samples of the base model."""

    stage: str
    groups: int
    share_with_signal: float
    """Share of groups whose completions earn different total rewards."""
    mean_reward: float
    mean_reward_std: float


class LabReport(StepResult):
    """Result of the reward lab. Files: probes.parquet (each probe with each score), report.md."""

    checks: list[LabCheck]
    forecasts: list[SignalForecast]

    @property
    def failures(self) -> list[LabCheck]:
        """The checks that stop the run."""
        return [check for check in self.checks if check.outcome == "failed"]


class ModelRef(Result):
    """A model to load: base weights, with or without an adapter."""

    path: str
    """Local folder, hub id or `embedded:` name."""
    revision: str | None = None
    adapter: Path | None = None
    """Folder of a PEFT adapter for the base."""
    sha256: str | None = None
    """Expected hash of the adapter's folder, or of the model's folder if there is no adapter. It is compared before each use."""


class StageResult(StepResult):
    """A finished stage. Files: see grpo_tasks/stage/stage_dir.py."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("final",)

    stage: str
    model: ModelRef
    """The model after this stage."""
    sha256: str
    """Hash of the trained weights: adapter_model.safetensors, or the model's own file after full fine-tuning."""
    steps: int
    stopped: Literal["max_steps", "target", "plateau"]
    """Why the stage ended."""
    best_step: int | None = None
    """The update that the weights come from, if it is not the last one."""
    resumed: int = 0
    """How often the stage resumed from a checkpoint."""
    metrics: dict[str, float]
    """Means over the last updates, at most ten."""


class MergeSpec(Result):
    """Input of a merge. The step writes it as spec.json."""

    model: ModelConfig
    ref: ModelRef
    prompts: list[list[dict[str, str]]]
    """Held-out chats for the proof."""
    max_new_tokens: int


class MergeFigures(Result):
    """Measurements of a merge, from which the step makes a `MergeProof`."""

    sha256: str
    prompts: int
    merge_difference: float
    max_logprob_difference: float
    mean_logprob_difference: float
    tolerance: float
    greedy_agreement: float
    size_bytes: int


class MergeProof(StepResult):
    """A merged model in `directory`/model with the proof that it equals base + adapter."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("model",)

    model: ModelRef
    sha256: str
    """Hash of all files of the model folder, names and contents."""
    prompts: int
    """Number of held-out prompts in the comparison."""
    merge_difference: float
    """Largest absolute difference (nats) of a token's log-probability between base + adapter and the merged model, in float32."""
    max_logprob_difference: float
    """The same after the merged model is saved in model.merged_dtype and loaded again."""
    mean_logprob_difference: float
    tolerance: float
    """Largest difference that is allowed at the saved precision."""
    greedy_agreement: float
    """Share of greedy tokens before the first difference."""
    size_bytes: int


class Interval(Result):
    """A value with its confidence interval."""

    value: float
    low: float
    high: float


class EvalReport(StepResult):
    """Held-out evaluation of one model. Files: samples.parquet (Samples in schemas/tables.py), report.md."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("samples.parquet",)

    label: str
    """base, merged, champion, or the stage's name."""
    model: ModelRef
    prompts: int
    num_samples: int
    temperature: float
    confidence: float
    metrics: dict[str, Interval]
    """By metric name (EVALUATION in schemas/metrics.py)."""
    pass_at_k: dict[int, Interval]
    """Unbiased pass@k of strictly right answers for k = 1, 2, 4 ... up to num_samples."""

    @property
    def samples(self) -> Path:
        """The table of all completions."""
        return self.directory / "samples.parquet"


class PairedTest(Result):
    """Paired test of a model against another one on the same prompts."""

    against: str
    """base or champion."""
    metric: str
    prompts: int
    difference: float
    """Mean over prompts of our metric minus theirs."""
    p_value: float
    """One-sided p-value: probability of such a difference if neither model were better."""
    better: bool


class Regression(Result):
    """A metric in which a new model may be worse than the previous one only within a limit."""

    metric: str
    against: str
    ours: float
    theirs: float
    limit: float
    """Largest value of ours that passes; the smallest one for format_rate."""
    passed: bool


class Lineage(Result):
    """Origin of a registered model version."""

    name: str
    version: str
    aliases: list[str]
    run_id: str
    experiment: str
    model_sha256: str
    """Hash of all files of the merged model."""
    adapter_sha256: str
    """Hash of the weights of the last stage."""
    data_digest: str
    config_sha256: str
    """Hash of the config (without tracking and resources) and of the data, models and reward files it names."""
    code_sha256: str
    """Hash of our code without comments and docstrings."""
    reward_sha256: str
    """Hash of the reward functions, built-in ones and the user's own."""
    commit: str
    dirty: bool
    python: str
    packages: dict[str, str]
    flow_run_id: str
    decision: str
    system_prompt: str


class Reproduction(Result):
    """Whether training a model again gave the same weights."""

    of: Lineage
    run_id: str
    adapter_sha256: str
    same: bool
    differences: list[str]
    """What differs from the original run: commit, packages, data."""


class Publication(StepResult):
    """The published version, and why the alias `champion` moved or did not."""

    run_id: str
    """MLflow parent run."""
    model_name: str
    model_version: str
    champion: bool
    """Whether this version has the alias `champion`."""
    tests: list[PairedTest]
    regressions: list[Regression] = []
    """Against the champion, or against the base if there was no champion."""
    reason: str
    """The decision in one sentence."""


class PublishedFacts(Result):
    """The decision of a publication: the fields that do not change when it is repeated."""

    model_name: str
    model_version: str
    champion: bool
    tests: list[PairedTest]
    regressions: list[Regression]
    reason: str

    @classmethod
    def of(cls, publication: Publication) -> Self:
        """The decision of a publication."""
        return cls.model_validate(publication.model_dump(include=set(cls.model_fields)))


class ReportResult(StepResult):
    """The report of a run. Files: report.html, report.md."""

    html: Path


class PipelineResult(Result):
    """Result of a whole pipeline."""

    publication: Publication
    evaluations: list[EvalReport]
    """Base, each stage, merged model."""
    report: Path
    """The report's HTML file."""


class RetrainResult(Result):
    """Result of a retraining."""

    trained: bool
    """False if a version already exists for the same data, code and config."""
    reason: str
    """The decision in one sentence."""
    publication: Publication | None = None
