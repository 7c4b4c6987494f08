"""`python -m tests.benchmarks.estimates [MODEL ...]`: the estimate of a run beside what its steps take, for three models.

The embedded model, a Llama of random weights, and each MODEL (a folder with a chat model). Each is tried, then its steps run in
this process, one after the other: seconds of computing time with one thread, which other work on the machine hardly changes.
Publishing is left out, because it runs in processes of MLflow.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from flows.estimate import rows_of, trial_spec
from grpo_tasks.grpo.speed import measure
from grpo_tasks.library import base_model, load_data, train_stage
from grpo_tasks.planning.time_plan import estimate
from grpo_tasks.policy.load import pick_device
from grpo_tasks.policy.merge import merge
from grpo_tasks.rollout.sample_table import sample_table
from grpo_tasks.rollout.spec import SampleSpec
from grpo_tasks.steps.merge_adapter import merge_spec
from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.paths import resolve
from schemas.results.data import DataReport
from schemas.results.model import ModelRef

SMALL = ["resources.num_threads=1", "evaluation.max_prompts=16", "evaluation.num_samples=2", "evaluation.stages=false"]
SIGNAL = ["rewards.functions={length: {params: {min_length: 400}}}", "stages.0.rewards=[length]", "stages.1.rewards=[length]"]
"""Other models than the demo's earn nothing by its rewards, and dead groups cost nothing."""
CHAT = [
    *SMALL,
    *SIGNAL,
    "data.system_prompt=null",
    "rollout.max_completion_length=96",
    "lab.num_prompts=2",
    "evaluation.max_prompts=4",
    "stages.0.per_device_train_batch_size=16",
    "stages.1.per_device_train_batch_size=16",
    "stages.0.max_steps=2",
    "stages.1.max_steps=2",
]


def configs(folder: Path, models: list[str]) -> Iterator[tuple[str, RunConfig]]:
    """What is estimated and run."""
    yield "embedded", load_config("demo", [*SMALL, "stages.0.max_steps=12", "stages.1.max_steps=12"])
    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded:base"))
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), intermediate_size=1024, **shape))
    for part in (model, tokenizer):
        part.save_pretrained(folder / "llama")
    random = [f"model.path={folder / 'llama'}", "stages.0.max_steps=4", "stages.1.max_steps=4"]
    yield "random Llama", load_config("demo", [*SMALL, *SIGNAL, *random])
    for name in models:
        yield Path(name).name, load_config("demo", [*CHAT, f"model.path={name}"])


def real_steps(config: RunConfig, data: DataReport, folder: Path) -> Iterator[tuple[str, float]]:
    """Seconds of every step that samples or trains."""
    model, resources = base_model(config), config.resources

    def timed(began: float) -> float:
        return time.process_time() - began

    def sampled(name: str, spec: SampleSpec) -> tuple[str, float]:
        began = time.process_time()
        sample_table(spec, folder)
        return name, timed(began)

    lab = {"num_samples": config.stages[0].num_generations, "max_prompts": config.lab.num_prompts}
    yield sampled("probe_rewards", SampleSpec.of(config, model, data.train, resources, **lab))
    yield sampled("evaluate_model-base", SampleSpec.of_evaluation(config, model, data.eval, resources))
    for stage in config.stages:
        began = time.process_time()
        model = train_stage(config, stage.name, data, folder / stage.name, start=model, in_process=True).model
        yield f"train_stage-{stage.name}", timed(began)
    yield sampled(f"evaluate_model-{stage.name}", SampleSpec.of_evaluation(config, model, data.eval, resources))
    began = time.process_time()
    merge(merge_spec(config, model, data, resources), folder, device=pick_device(resources))
    yield "merge_adapter", timed(began)
    merged = ModelRef(path=str(folder / "model"))
    yield sampled("evaluate_model-merged", SampleSpec.of_evaluation(config, merged, data.eval, resources))


def main(models: list[str]) -> None:
    """Print a table for each model."""
    with tempfile.TemporaryDirectory() as name:
        for title, config in configs(Path(name), models):
            folder = Path(name) / title
            data = load_data(config, folder / "data")
            speed = measure(trial_spec(config, data), clock=time.process_time)
            expected = {step.label: step.seconds for step in estimate(config, speed, rows_of(data, [])).steps}
            print(f"\n{title}: a trial of {speed.measured_s:.0f} s, {speed.live:.0%} of its groups with a signal\n")
            print("| step | estimate, s | real, s | ratio |\n|---|---:|---:|---:|")
            total = [0.0, 0.0]
            for label, seconds in real_steps(config, data, folder):
                total = [total[0] + expected[label], total[1] + seconds]
                print(f"| {label} | {expected[label]:.1f} | {seconds:.1f} | {expected[label] / seconds:.2f} |", flush=True)
            print(f"| in all | {total[0]:.1f} | {total[1]:.1f} | {total[0] / total[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
