"""What steps hand to each other and leave on disk: frozen, JSON, never pickle.

A result says where its files are (`directory`) and by which content it was made (`key`). Two results with the same key were made
from the same inputs by the same code; times are told but are no part of the key.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from schemas.config import ModelConfig


class Result(BaseModel):
    """A frozen record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def save(self, path: Path) -> None:
        """Write as JSON in one move, so that a reader never sees half of it."""
        part = path.with_name(path.name + ".part")
        part.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


class StepResult(Result):
    """What every step returns."""

    key: str
    """Content key of the step: a hash of its inputs and of the code it reaches."""
    directory: Path
    """Folder with the step's files."""
    seconds: float
    """How long the step took."""


class SourceFile(Result):
    """One input that was read."""

    path: str
    """As written in the config."""
    side: Literal["train", "eval"]
    rows: int
    sha256: str
    """Of the file's bytes; of the rows for a hub data set."""


class PreparedData(StepResult):
    """Every row as read, in one shape (`rows.parquet`, see schemas/tables.py RAW)."""

    sources: list[SourceFile]
    rows: int


class RuleCount(Result):
    """How often a row rule was broken."""

    rule: str
    meaning: str
    rows: int


class TokenLengths(Result):
    """Prompt lengths in tokens, after the chat template."""

    mean: float
    p50: int
    p95: int
    max: int
    limit: int


class DataReport(StepResult):
    """Verdict on the data. Files: train.parquet, eval.parquet (schemas/tables.py PROMPTS), quarantine.parquet, report.md."""

    rows: int
    """Rows read."""
    quarantined: int
    """Rows refused."""
    train_rows: int
    eval_rows: int
    rules: list[RuleCount]
    prompt_tokens: TokenLengths
    digest: str
    """SHA-256 over the accepted rows of both sides, in order: the data that made the model."""
    sources: list[SourceFile]
    """The files that were read."""

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
    """What was found, with the numbers."""
    prompt_id: str = ""
    place: str = ""
    """File and line of the row."""
    probe: str = ""
    """Which kind of completion (perfect, empty, tag_stuffed ...)."""
    completion: str = ""
    """The completion, shortened to 500 characters."""


class SignalForecast(Result):
    """How many groups of the base model's own samples would teach a stage anything."""

    stage: str
    groups: int
    share_with_signal: float
    """Share of groups whose completions earn different total rewards."""
    mean_reward: float
    mean_reward_std: float


class LabReport(StepResult):
    """What the reward lab found. Files: probes.parquet (every probe with every score), report.md."""

    checks: list[LabCheck]
    forecasts: list[SignalForecast]

    @property
    def failures(self) -> list[LabCheck]:
        """The checks that stop the run."""
        return [check for check in self.checks if check.outcome == "failed"]


class ModelRef(Result):
    """A model to load: base weights, and an adapter or none."""

    path: str
    """Directory or hub id, `embedded:` names allowed."""
    revision: str | None = None
    adapter: Path | None = None
    """PEFT adapter directory put on top of the base."""


class StageResult(StepResult):
    """A finished stage. Files: see grpo_tasks/stage/stage_dir.py."""

    stage: str
    model: ModelRef
    """The model after this stage."""
    sha256: str
    """Of the weights the stage made (adapter_model.safetensors, or the model's own files for full fine-tuning)."""
    steps: int
    stopped: Literal["max_steps", "target", "plateau"]
    """Why the stage ended."""
    best_step: int | None = None
    """The update whose weights these are, when it was not the last one."""
    resumed: int = 0
    """How often it was taken up again from a checkpoint."""
    metrics: dict[str, float]
    """Means over the last updates (at most ten)."""


class MergeSpec(Result):
    """What one merge works on; the step writes it as spec.json."""

    model: ModelConfig
    ref: ModelRef
    prompts: list[list[dict[str, str]]]
    """Held-out chats the proof is made on."""
    max_new_tokens: int


class MergeFigures(Result):
    """The figures of the proof; the step makes a `MergeProof` of them."""

    sha256: str
    prompts: int
    merge_difference: float
    max_logprob_difference: float
    mean_logprob_difference: float
    tolerance: float
    greedy_agreement: float
    size_bytes: int


class MergeProof(StepResult):
    """A merged model in `directory`/model, and the evidence that it equals base + adapter."""

    model: ModelRef
    sha256: str
    """Over all files of the model folder, names and contents."""
    prompts: int
    """Held-out prompts compared on."""
    merge_difference: float
    """Largest |difference| (nats) of a token's log-probability between base + adapter and the merge, in float32."""
    max_logprob_difference: float
    """The same after saving in the wanted dtype and reloading."""
    mean_logprob_difference: float
    tolerance: float
    """Largest difference allowed at the saved precision."""
    greedy_agreement: float
    """Share of greedily decoded tokens that agree up to the first difference."""
    size_bytes: int


class Interval(Result):
    """A figure with its confidence interval."""

    value: float
    low: float
    high: float


class EvalReport(StepResult):
    """Held-out evaluation of one model. Files: samples.parquet (schemas/tables.py SAMPLES), report.md."""

    label: str
    """base, merged, champion, or the stage's name."""
    model: ModelRef
    prompts: int
    num_samples: int
    temperature: float
    confidence: float
    metrics: dict[str, Interval]
    """By the names of schemas/metrics.py EVALUATION."""
    pass_at_k: dict[int, Interval]
    """Unbiased pass@k of strict answers, for k = 1, 2, 4 ... up to num_samples."""

    @property
    def samples(self) -> Path:
        """The table of all completions."""
        return self.directory / "samples.parquet"


class PairedTest(Result):
    """A model against another on the same prompts."""

    against: str
    """base or champion."""
    metric: str
    prompts: int
    difference: float
    """Mean over prompts of ours minus theirs."""
    p_value: float
    """One-sided: probability of such a difference if neither were better."""
    better: bool


class Regression(Result):
    """A figure in which a new model must not be worse than the one before by more than a limit."""

    metric: str
    against: str
    ours: float
    theirs: float
    limit: float
    """Largest (for format_rate: smallest) value of ours that passes."""
    passed: bool


class Lineage(Result):
    """Where a registered version came from."""

    name: str
    version: str
    aliases: list[str]
    run_id: str
    experiment: str
    model_sha256: str
    """Over all files of the merged model."""
    adapter_sha256: str
    """Of the last stage's weights."""
    data_digest: str
    config_sha256: str
    """Of the config (without tracking and resources) and of the data, models and reward files it names."""
    code_sha256: str
    """Of the rooms' code, comments and docstrings left out."""
    reward_sha256: str
    """Of the built-in reward functions and the user's own."""
    commit: str
    dirty: bool
    python: str
    packages: dict[str, str]
    flow_run_id: str
    decision: str
    system_prompt: str


class Reproduction(Result):
    """Whether a model came out the same when it was made again."""

    of: Lineage
    run_id: str
    adapter_sha256: str
    same: bool
    differences: list[str]
    """What is not as it was then: commit, packages, data."""


class Publication(StepResult):
    """What was published, and why the alias moved or did not."""

    run_id: str
    """MLflow parent run."""
    model_name: str
    model_version: str
    champion: bool
    """Whether this version carries the alias `champion` now."""
    tests: list[PairedTest]
    regressions: list[Regression] = []
    """Checked against the champion, or against the base where there was none."""
    reason: str
    """The decision in one sentence."""


class PublishedFacts(Result):
    """What a publication decided: the part of it that is the same whenever it is repeated."""

    model_name: str
    model_version: str
    champion: bool
    tests: list[PairedTest]
    regressions: list[Regression]
    reason: str

    @classmethod
    def of(cls, publication: Publication) -> Self:
        """The facts of a publication."""
        return cls.model_validate(publication.model_dump(include=set(cls.model_fields)))


class ReportResult(StepResult):
    """The run as one page. Files: report.html, report.md."""

    html: Path


class PipelineResult(Result):
    """What a run of the whole pipeline came to."""

    publication: Publication
    evaluations: list[EvalReport]
    """Base, each stage, merged."""
    report: Path
    """The report's HTML file."""


class RetrainResult(Result):
    """What a retraining came to."""

    trained: bool
    """False: neither data nor code nor config has changed since a version was made of them."""
    reason: str
    """The decision in one sentence."""
    publication: Publication | None = None
