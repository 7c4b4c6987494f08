"""What steps hand to each other and leave on disk: frozen, JSON, never pickle.

A result says where its files are (`directory`) and by which content it was made (`key`). Two results with the same key were made
from the same inputs by the same code; times are told but are no part of the key.
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
        """Write as JSON in one move, so that a reader never sees half of it."""
        part = path.with_name(path.name + ".part")
        part.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


class OutputFile(Result):
    """One file that a step has left."""

    path: str
    """Relative to the step's folder, with slashes."""
    bytes: int
    sha256: str


class StepResult(Result):
    """What every step returns. Saved with the manifest of the step's files and a seal, it says that the step is finished."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ()
    """Files and folders of the step that later steps read; their contents count in the keys of those steps."""

    key: str
    """Content key of the step: a hash of its inputs and of the code it reaches."""
    directory: Path
    """Folder with the step's files."""
    seconds: float
    """How long the step took."""
    manifest: tuple[OutputFile, ...] = ()
    """Every output file; empty until the step has ended."""
    seal: str = ""
    """SHA-256 over everything else here; empty until the step has ended."""

    def sealed(self, manifest: tuple[OutputFile, ...]) -> Self:
        """The result of a finished step: with its manifest, and a seal that proves the file it is saved to."""
        whole = self.model_copy(update={"manifest": manifest, "seal": ""})
        return whole.model_copy(update={"seal": whole._digest()})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            DamagedError: the file is not what was written.
        """
        try:
            result = super().load(path)
        except ValueError as error:
            raise DamagedError("the result cannot be read", place=str(path)) from error
        if result.seal and result.seal != result._digest():
            raise DamagedError("the result is not what the step wrote (its seal differs)", place=str(path))
        return result

    def moved_to(self, directory: Path) -> Self:
        """The same result after its folder was moved: every path inside the folder follows."""
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
    """One input that was read."""

    path: str
    """As written in the config."""
    split: Literal["train", "eval"]
    rows: int
    sha256: str
    """Of the file's bytes; of the rows for a hub data set."""


class PreparedData(StepResult):
    """Every row as read, in one shape (`rows.parquet`, see schemas/tables.py RAW)."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("rows.parquet",)

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

    OUTPUTS: ClassVar[tuple[str, ...]] = ("train.parquet", "eval.parquet")

    rows: int
    """Rows read."""
    quarantined: int
    """Rows refused."""
    train_rows: int
    eval_rows: int
    rules: list[RuleCount]
    prompt_tokens: TokenLengths
    digest: str
    """SHA-256 over the accepted rows of both splits, in order: the data that made the model."""
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
    sha256: str | None = None
    """What the adapter's folder must hash to, or the model's where there is no adapter. Compared before each use."""


class StageResult(StepResult):
    """A finished stage. Files: see grpo_tasks/stage/stage_dir.py."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("final",)

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

    OUTPUTS: ClassVar[tuple[str, ...]] = ("model",)

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

    OUTPUTS: ClassVar[tuple[str, ...]] = ("samples.parquet",)

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
