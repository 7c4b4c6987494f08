"""References to models, and the results of training and merging."""

import math
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from schemas.config.model import LoraConfig, ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.metrics import REWARD
from schemas.results.base import Result, Section, StepResult


class ModelRef(Result):
    """A model to load: base weights, with or without an adapter."""

    path: str  # local folder, hub id or `embedded:` name
    revision: str | None = None
    adapter: Path | None = None
    sha256: str | None = None
    """Expected hash of the adapter's folder, or else of the model's. It is compared before each use."""


class KeptPrompts(Result):
    """The prompts that a stage trains on, by their pass rates. The others are in left_out.parquet of the stage."""

    prompts: int
    kept: int
    low: float
    high: float
    never_solved: int
    """Left out because no completion was solved: too hard for now, or with a wrong ground truth."""
    below: int  # pass rate above 0 and below `low`
    above: int  # pass rate above `high` and below 1
    always_solved: int
    unknown: int  # kept

    @property
    def left_out(self) -> int:
        """Prompts that the stage does not train on."""
        return self.prompts - self.kept

    def summary(self) -> str:
        """The choice in one sentence."""
        counts = {
            "never solved": self.never_solved,
            f"solved less often than {self.low:g}": self.below,
            f"solved more often than {self.high:g}": self.above,
            "always solved": self.always_solved,
        }
        left = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        unknown = f"; {self.unknown:,} without a pass rate are kept" if self.unknown else ""
        band = f"a pass rate from {self.low:g} to {self.high:g}"
        return f"{self.kept:,} of {self.prompts:,} prompts have {band}" + (f"; left out: {left}" if left else "") + unknown


class StageResult(StepResult):
    """A finished stage. Files: see grpo_tasks/stage/stage_dir.py."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("final",)

    stage: str
    model: ModelRef
    sha256: str
    """Of the trained weights: adapter_model.safetensors, or the model's own file after full fine-tuning."""
    steps: int
    stopped: Literal["max_steps", "target", "plateau"]
    best_step: int | None = None
    """The update that the weights come from, if it is not the last one."""
    resumed: int = 0
    metrics: dict[str, float]
    """Means over the last updates, at most ten."""
    kept: KeptPrompts | None = None
    """None where no pass rates were known."""

    def headline(self) -> str:
        """How the stage ended."""
        reward = f", reward {self.metrics[REWARD]:.3f}" if REWARD in self.metrics else ""
        return f"{self.stage}: {self.steps} updates, stopped by {self.stopped}{reward}"


class StructureSpec(Result):
    """What a model is compared with before it is loaded. A check writes it as spec.json."""

    path: str
    revision: str | None = None
    lora: LoraConfig | None
    longest: int
    """Tokens of the longest prompt with the longest completion."""


class StructureNotes(Result):
    """What the check found."""

    notes: list[str]


PROOF_PROMPTS = 16
"""Held-out prompts that the merged model is compared on."""
PROOF_TOKENS = 64
"""Greedy tokens that a merge proof compares for each prompt, and that a published model must repeat."""


class Sampling(Result):
    """How the completions of a run are drawn: the settings of `rollout` that belong to the model."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int | str] = Field(default_factory=list)

    @classmethod
    def of(cls, rollout: RolloutConfig) -> Self:
        """The sampling of a run."""
        return cls.model_validate({name: getattr(rollout, name) for name in cls.model_fields})


class MergeSpec(Result):
    """Input of a merge. The step writes it as spec.json."""

    model: ModelConfig
    ref: ModelRef
    prompts: list[list[dict[str, str]]]
    """Held-out chats for the proof."""
    max_new_tokens: int
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Defaults that the chat template of the merged model gets, as it gets the next two."""
    system_prompt: str | None = None
    sampling: Sampling = Field(default_factory=Sampling)
    num_threads: int | None = None
    """As in `resources`."""


class GreedyAnswer(Result):
    """What the merged model answers to a held-out prompt, without special tokens, always taking the likeliest token."""

    messages: list[dict[str, str]]
    text: str


def percent(share: float) -> str:
    """Rounded down, so that 99.96 % is not called all of it."""
    return f"{math.floor(max(0.0, share) * 1000) / 10:g} %"


MergedDtype = Literal["bfloat16", "float16", "float32"]


class RefusedPrecision(Result):
    """A precision that the merged model was not saved in."""

    dtype: MergedDtype
    kept_weights: float
    kept: float | None = None
    """As in `MergeFigures`; None where the weights decided."""
    reason: str


class MergeFigures(Result):
    """Measurements of a merge, from which the step makes a `MergeProof`."""

    sha256: str
    """Hash of all files of the model folder, names and contents."""
    dtype: MergedDtype
    prompts: int
    kept: float
    """Share of what the policy changed that the saved model kept: 1 - sqrt(merged_kl / base_kl); 1 where it changed nothing."""
    kept_weights: float
    """Share of the change of the weights that is left after rounding, in its direction."""
    base_kl: float
    """Mean KL divergence (nats) of the base from base + adapter, over the tokens of its completions: what training changed."""
    merged_kl: float
    """The same of the saved model: what was lost or added."""
    merge_difference: float
    """Largest absolute difference (nats) of a token's log-probability between base + adapter and the merged model, in float32."""
    max_logprob_difference: float
    """The same after the merged model is saved and loaded again."""
    mean_logprob_difference: float
    """Mean absolute difference (nats) after saving and loading."""
    base_logprob_difference: float
    """Mean absolute difference (nats) between base and base + adapter, for comparison."""
    tolerance: float
    """Largest mean difference (nats) that is allowed at the saved precision."""
    greedy_agreement: float
    """Share of the greedy tokens of base + adapter before the first one that the saved model would choose otherwise."""
    base_greedy_agreement: float
    """The same of the base, for comparison."""
    size_bytes: int
    refused: list[RefusedPrecision] = Field(default_factory=list)
    """Shorter precisions that model.merged_dtype: auto tried before."""
    answers: list[GreedyAnswer] = Field(default_factory=list)
    """To the first prompts. A published model must give the same (grpo_tasks/tracking/proof.py)."""

    def saved_as(self) -> str:
        """The precision, and what it keeps."""
        return f"{self.dtype} ({self._learned()})"

    def choice(self) -> str:
        """The precision, what it keeps, and why no shorter one was taken."""
        return "; ".join([f"{self.dtype}: {self._learned()}", *(f"not {one.dtype}: {one.reason}" for one in self.refused)])

    def _learned(self) -> str:
        return f"keeps {percent(self.kept)} of what training changed" if self.base_kl > 0 else "training changed nothing"


class MergeProof(StepResult, MergeFigures):
    """A merged model in `directory`/model with the proof that it equals base + adapter."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("model",)

    model: ModelRef
    policy: ModelRef
    """What was merged."""

    def headline(self) -> str:
        """Precision, what it keeps of the training, and why."""
        return f"merged in {self.choice()}"

    def sections(self) -> list[Section]:
        """How far the merged model is from base + adapter, and which precisions were tried."""
        distance = f"difference of a token's log-probability, nats (limit {self.tolerance:g})"
        rows = [
            ["KL divergence, nats per token", f"{self.base_kl:.3g}", f"{self.merged_kl:.3g}"],
            [distance, f"{self.base_logprob_difference:.2g}", f"{self.mean_logprob_difference:.2g}"],
            ["identical greedy tokens", f"{self.base_greedy_agreement:.1%}", f"{self.greedy_agreement:.1%}"],
        ]
        tried = [[one.dtype, percent(one.kept_weights), one.reason] for one in self.refused]
        tried.append([self.dtype, percent(self.kept_weights), f"taken: it keeps {percent(self.kept)} of what the policy changed"])
        compared = (
            f"Saved in {self.choice()}. Base and merged model are compared with base + adapter, on a likeliest and a sampled "
            f"completion of {self.prompts} held-out prompts."
        )
        rounding = (
            f"Before rounding, a token's log-probability differs by at most {self.merge_difference:.2g} nats. Size "
            f"{self.size_bytes / 2**20:.1f} MiB, SHA-256 {self.sha256}."
        )
        columns, sizes = ("base", "merged model"), ("precision", "change of the weights kept", "result")
        return [
            Section(text=compared, columns=("distance from base + adapter", *columns), rows=rows, right=columns),
            Section(columns=sizes, rows=tried, right=sizes[1:2]),
            Section(text=rounding),
        ]
