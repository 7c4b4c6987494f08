"""What the pipeline does with a model of the zoo, compared with the truth.

    fast       right, every prompt encoded once for its group
    slow       right, the slow way, with a warning
    refused    one sentence (schemas/errors.py), before any work

`wrong` and `traceback` are faults of the pipeline. They never stand in table.json, which has the verdict of each model as it was
last measured; docs/models.md is made from it.
"""

import json
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor

from grpo_tasks.grpo.policies import Policies
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.load import load_policy, load_tokenizer, trainable_policy
from grpo_tasks.policy.logprobs import TokenScores
from grpo_tasks.policy.structure import check_positions
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rewards import RewardsConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.stage import StageConfig
from schemas.errors import Notice, UserError
from schemas.results.model import ModelRef
from tests.zoo import build, truth
from tests.zoo.kinds import ATTENTION, LEFT_OUT, VARIANTS, ZOO
from tests.zoo.truth import Row, Scores

PATH = Path(__file__).parent / "table.json"

QUICK = (
    "qwen2", "qwen3", "qwen3_moe", "llama", "llama_llama3", "gemma2", "gemma3_text", "mistral", "phi3", "granite", "cohere2",
    "smollm3", "olmo2", "gpt2", "nemotron",
)  # fmt: skip
"""Models that every test run measures; the others are measured in the long tests."""
MAIN = (*QUICK, "qwen3_5_text", "lfm2", "granitemoehybrid", "nemotron_h")
"""Models of the families that people train, which stand first on the page."""

_FOLDER = re.compile(r"/\S+?/zoo-[\w-]+")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?= nats)")
CPU = torch.device("cpu")
TEMPERATURE = 0.8
TOLERANCE = 5e-3
"""Largest difference of a log-probability or entropy (nats) that rounding in float32 explains."""
GRADIENT_TOLERANCE = 1e-2
"""Largest norm of the difference of two gradients, as a share of the norm."""
NEW_TOKENS = 12


def _tokens(seed: int, count: int) -> list[int]:
    # Ordinary tokens: the last ones are special, and some wrappers keep one for images.
    return torch.randint(5, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [_tokens(1, 4), _tokens(2, 11), _tokens(3, 23)]
PROMPT_OF = [0, 0, 0, 1, 2, 2]
START = _tokens(4, 5)
COMPLETIONS = [_tokens(5, 9), START + _tokens(6, 9), START + _tokens(7, 3), _tokens(8, 21), _tokens(9, 6), _tokens(10, 13)]
"""Of unequal lengths, two with a common start, longer than the windows of the zoo (16 tokens)."""
ROWS: list[Row] = [(PROMPTS[at], completion) for at, completion in zip(PROMPT_OF, COMPLETIONS, strict=True)]
WEIGHTS = [torch.linspace(-1, 1, len(completion)) + 0.3 for completion in COMPLETIONS]
"""Weights of the tokens in the loss whose gradient is compared."""


@dataclass(slots=True)
class Verdict:
    """What the pipeline does with a model."""

    name: str
    sentences: list[str] = field(default_factory=list)
    """Its warnings, or the sentence with which it refuses."""
    refused: bool = False
    faults: list[str] = field(default_factory=list)
    """What is wrong or crashed, and where."""
    differences: dict[str, float] = field(default_factory=dict)

    def say(self, sentences: Sequence[str]) -> None:
        """Add sentences that are not there yet."""
        self.sentences += [sentence for sentence in sentences if sentence not in self.sentences]

    @property
    def way(self) -> str:
        """The verdict in one word."""
        if self.faults:
            return "traceback" if any(fault.startswith("traceback") for fault in self.faults) else "wrong"
        return "refused" if self.refused else "slow" if self.sentences else "fast"


@cache
def _tokenizer() -> Any:
    return load_tokenizer(ModelRef(path="embedded:base"))


@cache
def _ranks() -> Ranks:
    return Ranks(Accelerator(cpu=True))


def measure(name: str, folder: Path, *, whole: bool = True) -> Verdict:
    """Build a model in a folder, and compare what the pipeline does with it.

    Args:
        name: of the zoo.
        folder: where the model is saved.
        whole: sample without the adapter and from repeated prompts, and merge. That adds no sentences.
    """
    verdict = Verdict(name)
    build.save(name, folder)
    base = truth.load(folder, ATTENTION.get(name, "eager"))
    ref = ModelRef(path=str(folder))
    config = ModelConfig(path=ref.path)
    with _watched(verdict, "positions", refusable=True):
        # As before a run (flows/preflight.py).
        check_positions(base, max(len(prompt) for prompt in PROMPTS) + max(map(len, COMPLETIONS)))
    if verdict.refused:
        return verdict
    if whole:
        with _watched(verdict, "sampling, base", refusable=True):
            _sampling(verdict, "base", base, load_policy(ref, config, device=CPU), whole=True)
    with _watched(verdict, "new adapter", refusable=True):
        fresh: Any = trainable_policy(ref, config, device=CPU, seed=1)
        chosen = fresh.peft_config["default"]
        _adapter(verdict, truth.adapted(base, chosen.target_modules, chosen.exclude_modules), folder, config, whole=whole)
    return verdict


def _adapter(verdict: Verdict, adapted: PeftModel, folder: Path, config: ModelConfig, *, whole: bool) -> None:
    """Everything with an adapter: that of the truth, which the pipeline loads."""
    adapted.save_pretrained(folder / "adapter")
    ref = ModelRef(path=str(folder), adapter=folder / "adapter")
    with _watched(verdict, "training", refusable=True):
        policy = trainable_policy(ref, config, device=CPU, seed=1).train()
        scores = scorer(policy, ref, config)
        _scores(verdict, "training", adapted, scores)
        _gradients(verdict, "gradients", adapted, policy, scores)
    with _watched(verdict, "sampling, adapter", refusable=True):
        _sampling(verdict, "adapter", adapted, trainable_policy(ref, config, device=CPU, seed=1), whole=whole)
    if whole and not verdict.refused:
        with _watched(verdict, "merge"):
            _merge(verdict, adapted, ref, config)


def scorer(policy: Any, ref: ModelRef, config: ModelConfig) -> Callable[[], TokenScores]:
    """How the trainer scores completions with this policy: by the way that the pipeline chooses for the model."""
    spec = StageSpec(
        key="zoo",
        stage=StageConfig(name="zoo", rewards=["format"], beta=0.0, kl_every_steps=0),
        seed=1,
        model=config,
        start=ref,
        rewards=RewardsConfig(),
        rollout=RolloutConfig(temperature=TEMPERATURE, max_completion_length=32),
        resources=ResourcesConfig(device="cpu", num_threads=1),
        train=Path("none"),
    )
    policies = Policies(policy, spec, _ranks())
    return lambda: policies.scores(_batch())


def _batch() -> Any:
    return token_batch(PROMPTS, COMPLETIONS, PROMPT_OF, device=CPU, share_starts=True)


@contextmanager
def _watched(verdict: Verdict, what: str, *, refusable: bool = False) -> Iterator[None]:
    """Keep the warnings and errors of a part: a notice is a sentence, an error of the family a refusal, another one a fault."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except UserError as error:
            if refusable:
                verdict.refused = True
                verdict.say([" ".join(str(error).split())])
            else:
                verdict.faults.append(f"traceback in {what}: {error}")
        except Exception as error:  # whatever a library raises is what this program looks for
            verdict.faults.append(f"traceback in {what}: {_last_lines(error)}")
    verdict.say([str(one.message) for one in caught if issubclass(one.category, Notice)])


def _last_lines(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:]]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({' > '.join(places)})"


def _compare(verdict: Verdict, what: str, difference: float, tolerance: float = TOLERANCE) -> None:
    verdict.differences[what] = difference
    if not difference <= tolerance:
        verdict.faults.append(f"wrong: {what} off by {difference:.2g}")


def _scores(verdict: Verdict, what: str, adapted: PeftModel, scores: Callable[[], TokenScores]) -> None:
    with torch.no_grad():
        # The pipeline first: where peft's own pass fails, it has to refuse.
        found = scores()
        logps, entropies = _largest(truth.score(adapted, ROWS, TEMPERATURE), found)
    _compare(verdict, f"{what} log-probs", logps)
    _compare(verdict, f"{what} entropies", entropies)


def _largest(wanted: Sequence[Scores], found: TokenScores) -> tuple[float, float]:
    pairs = [
        ((one.logps - logps[: len(one.logps)]).abs().max(), (one.entropies - entropies[: len(one.logps)]).abs().max())
        for one, logps, entropies in zip(wanted, found.logps, found.entropies, strict=True)
    ]
    logps, entropies = (torch.stack(side).max().item() for side in zip(*pairs, strict=True))
    return logps, entropies


def _gradients(verdict: Verdict, what: str, adapted: PeftModel, policy: Any, scores: Callable[[], TokenScores]) -> None:
    wanted = truth.gradient(adapted, ROWS, TEMPERATURE, WEIGHTS)
    found = scores().logps
    weights = torch.zeros_like(found)
    for row, weight in enumerate(WEIGHTS):
        weights[row, : len(weight)] = weight
    (found * weights).sum().backward()
    ours = {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}
    both = [(wanted.get(name), ours.get(name)) for name in {*wanted, *ours}]
    apart = sum(_distance(left, right) for left, right in both) ** 0.5
    _compare(verdict, what, apart / sum(_distance(grad, None) for grad in wanted.values()) ** 0.5, GRADIENT_TOLERANCE)


def _distance(left: Tensor | None, right: Tensor | None) -> float:
    """Squared distance of two gradients; None is zero."""
    if left is None or right is None:
        given = left if right is None else right
        return 0.0 if given is None else given.double().square().sum().item()
    return (left.double() - right.double()).square().sum().item()


def _sampling(verdict: Verdict, which: str, model: Any, policy: Any, *, whole: bool) -> None:
    """Completions of groups of prompts, greedy and sampled, with the log-probabilities that the engine reports."""
    for shared in (True, False) if whole and which == "adapter" else (True,):
        part = f"{which}, {'shared' if shared else 'repeated'} prompts"
        with _watched(verdict, f"sampling, {part}", refusable=True):
            engine = LocalEngine(policy, _tokenizer(), share_prompts=shared)
            for temperature in (0.0, TEMPERATURE) if shared else (0.0,):
                _sample(verdict, part, model, engine, temperature)


@torch.no_grad()
def _sample(verdict: Verdict, which: str, model: Any, engine: LocalEngine, temperature: float) -> None:
    requests = [Request(prompt, seed) for prompt in PROMPTS for seed in (0, 1)]
    config = RolloutConfig(max_completion_length=NEW_TOKENS, temperature=TEMPERATURE)
    drawn = engine.generate(requests, Sampling.of(config, temperature=temperature))
    rows = [(list(request.prompt_ids), one.token_ids) for request, one in zip(requests, drawn, strict=True)]
    if temperature == 0.0:
        _compare(verdict, f"{which}: greedy tokens", truth.short_of_greedy(model, rows))
    wanted = truth.score(model, rows, temperature or 1.0)
    off = [(one.logps - torch.tensor(ours.logprobs)).abs().max() for one, ours in zip(wanted, drawn, strict=True)]
    _compare(verdict, f"{which}: reported log-probs at {temperature}", torch.stack(off).max().item())


def _merge(verdict: Verdict, adapted: PeftModel, ref: ModelRef, config: ModelConfig) -> None:
    """Merge as merge.py does: in float32, saved, loaded again."""
    merged: Any = load_policy(ref, config, device=CPU, dtype="float32").merge_and_unload()
    target = Path(ref.path) / "merged"
    merged.save_pretrained(target)
    with torch.no_grad():
        wanted, found = (
            truth.score(one, ROWS, TEMPERATURE) for one in (adapted, truth.load(target, ATTENTION.get(verdict.name, "eager")))
        )
    pairs = zip(wanted, found, strict=True)
    _compare(verdict, "merged", max((left.logps - right.logps).abs().max().item() for left, right in pairs))


def row(verdict: Verdict) -> dict[str, Any]:
    """A verdict as a row of the table. Differences depend on the machine, and so are left out of the sentences."""
    kind, _ = ZOO[verdict.name]
    has = VARIANTS[verdict.name][1] if verdict.name in VARIANTS else ""
    sentences = {_NUMBER.sub("...", _FOLDER.sub("FOLDER", sentence)) for sentence in verdict.sentences}
    # The notice of a part that goes on says nothing about a run that is refused.
    shown = {sentence for sentence in sentences if " fix: " in sentence} if verdict.refused else sentences
    return {"type": kind, "has": has, "way": verdict.way, "sentences": sorted(shown)}


def write(verdict: Verdict) -> None:
    """Write the row of a model into the table."""
    models = json.loads(PATH.read_text(encoding="utf-8"))["models"] if PATH.exists() else {}
    models[verdict.name] = row(verdict)
    table = {
        "transformers": transformers.__version__,
        "main": list(MAIN),
        "models": {name: models[name] for name in ZOO if name in models},
        "left_out": LEFT_OUT,
    }
    PATH.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
