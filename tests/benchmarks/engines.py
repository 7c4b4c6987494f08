"""`python -m tests.benchmarks.engines`: the rollout engines on this machine's CPU.

Tokens per second, swap included: 64 completions of at most 64 tokens for 8 prompts of the demo. Then updates by a vLLM server,
with `max_staleness` 0 and 1. The servers come from .venv-vllm (make vllm).

    python -m tests.benchmarks.engines --staleness     the demo's stages with `max_staleness` 0, 1 and 4: what it learns, the age
                                                       of the policy that sampled, and the wait for a rollout (half an hour)
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.grpo.sampler import rollout_servers
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.library import base_model, evaluate, load_data, merge, train_stage
from grpo_tasks.policy.load import load_tokenizer, pick_device, trainable_policy
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rollout.engine import Request, RolloutEngine, Sampling, completion_seed
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.rollout.vllm_server import ServerModel, serving
from grpo_tasks.stage.journal import Journal
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.load import load_config
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig, VllmConfig
from schemas.metrics import ACCURACY, POLICY_LAG, TRAINER_WAIT
from schemas.paths import resolve
from schemas.results.model import ModelRef
from tests.benchmarks.sides import Work, write_stage

ROUNDS, PROMPTS, GROUP, LENGTH = 5, 8, 8, 64
BOUNDS = (0, 1, 4)


def main() -> None:
    """Measure the engines, or with `--staleness` what an older policy costs."""
    if sys.argv[1:] == ["--staleness"]:
        with tempfile.TemporaryDirectory() as folder:
            staleness(Path(folder))
    else:
        engines()


def engines() -> None:
    """Measure in turns and print."""
    device, ref, config = pick_device(ResourcesConfig(device="cpu", num_threads=2)), ModelRef(path="embedded:base"), VllmConfig()
    policy, tokenizer = trainable_policy(ref, ModelConfig(), device=device, seed=1).eval(), load_tokenizer(ref)
    folder, model = Path(tempfile.mkdtemp()), Path(resolve(ref.path))
    with (
        serving(config, ServerModel(model, "float32", 16, cuda=False), folder) as with_adapters,
        serving(config, ServerModel(model, "float32", None, cuda=False), folder) as plain,
    ):
        engines: dict[str, RolloutEngine] = {"local": LocalEngine(policy, tokenizer)}
        for name, servers in (("vllm, adapter", with_adapters), ("vllm, merged", plain)):
            merged = servers is plain
            weights = folder / name.replace(", ", "-")
            engines[name] = VllmEngine(policy, tokenizer, config, servers, weights=weights, dtype="float32", merged=merged)
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(ROUNDS + 1):
            for name, engine in engines.items():
                rate = _tokens_per_s(engine, tokenizer, turn)
                if turn:
                    rates[name].append(rate)
    for name, found in rates.items():
        print(f"{name:15} {statistics.median(found):8.0f} tokens/s")
    _overlap(folder)


def staleness(folder: Path) -> None:
    """Train the demo with each bound and print a line of the table in docs/gpus.md."""
    print("| `max_staleness` | accuracy, base to merged | policy lag, median and highest | wait for a rollout, median |")
    print("|---:|---|---:|---:|")
    for bound in BOUNDS:
        settings = [f"stages.{number}.importance_sampling_correction=token_truncate" for number in range(2)] if bound else []
        config = load_config("demo", ["seed=1", "rollout.engine=vllm", f"rollout.max_staleness={bound}", *settings])
        here, model, lines = folder / str(bound), base_model(config), []
        data = load_data(config, here / "data")
        for stage in config.stages:
            model = train_stage(config, stage.name, data, here / stage.name, start=model).model
            lines += Journal(StageDir(here / stage.name).journal, writes=False).steps.values()
        merged = merge(config, model, data, here / "merged").model
        models = {"before": base_model(config), "after": merged}
        reports = [evaluate(config, one, data, here / name).metrics[ACCURACY].value for name, one in models.items()]
        lags, waits = ([line[name] for line in lines] for name in (POLICY_LAG, TRAINER_WAIT))
        accuracy = " to ".join(f"{100 * value:.1f} %" for value in reports)
        ages = f"{statistics.median(lags):g}, {max(lags):g}"
        print(f"| {bound} | {accuracy} | {ages} | {statistics.median(waits):.2f} s |", flush=True)


def _overlap(folder: Path) -> None:
    """Median duration of an update, in turns."""
    work = Work(
        resolve("embedded:base"), 40, LENGTH, PROMPTS, GROUP, 20, stage={"importance_sampling_correction": "token_truncate"}
    )
    found: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2):
        for overlap in found:
            root = folder / f"stage-{turn}-{overlap}"
            root.mkdir()
            directory = write_stage(work, root)
            spec = StageSpec.load(directory.spec)
            rollout = spec.rollout.model_copy(update={"engine": "vllm", "max_staleness": int(overlap)})
            spec.model_copy(update={"rollout": rollout}).save(directory.spec)
            spec = StageSpec.load(directory.spec)
            with RewardSuite(spec.rewards, spec.stage.rewards) as suite, rollout_servers(spec, directory) as servers:
                trainer = Trainer(directory, suite, servers)
                trainer.train()
            found[overlap] += [trainer.journal.steps[step]["step_time"] for step in range(3, work.updates + 1)]
    plain, ahead = (statistics.median(found[overlap]) for overlap in (False, True))
    print(f"update by vLLM {plain:.2f} s, one ahead {ahead:.2f} s: {plain / ahead:.2f} x faster")


def _tokens_per_s(engine, tokenizer, turn) -> float:
    system = {"role": "system", "content": "Reply with <reasoning>...</reasoning><answer>...</answer>."}
    chats = [[system, {"role": "user", "content": f"What is {11 + index} + 27?"}] for index in range(PROMPTS)]
    prompts = [prompt_ids(tokenizer, chat) for chat in chats for _ in range(GROUP)]
    seeds = [completion_seed("bench", turn, index) + member for index in range(PROMPTS) for member in range(GROUP)]
    requests = [Request(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    began = time.perf_counter()
    engine.sync()
    drawn = engine.generate(requests, Sampling.of(RolloutConfig(max_completion_length=LENGTH)))
    return sum(len(completion.token_ids) for completion in drawn) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
