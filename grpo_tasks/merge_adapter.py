"""Step: merge the last stage's adapter into the base model, and prove that the merged model is the same policy."""

import time

from grpo_tasks.content.markdown import code, table
from grpo_tasks.data.table import read_prompts
from grpo_tasks.processes.child import run_module
from grpo_tasks.processes.entry import RESULT, SPEC
from grpo_tasks.running.step import Work, step
from schemas.config.model import ModelConfig
from schemas.results.data import DataReport
from schemas.results.model import MergeFigures, MergeProof, MergeSpec, ModelRef

PROOF_PROMPTS = 16
PROOF_TOKENS = 64


@step(rooms=("policy", "data"), retries=1, device=True)
def merge_adapter(work: Work, ref: ModelRef, data: DataReport, *, model: ModelConfig) -> MergeProof:
    """Merge in float32, save, reload and compare. A merged model that differs raises an error and is never published."""
    began = time.perf_counter()
    rows = read_prompts(data.eval, limit=PROOF_PROMPTS)
    chats = [[dict(message) for message in row.messages] for row in rows]
    MergeSpec(model=model, ref=ref, prompts=chats, max_new_tokens=PROOF_TOKENS).save(work.directory / SPEC)
    run_module("grpo_tasks.policy", work.directory)
    figures = MergeFigures.load(work.directory / RESULT)
    work.artifact("merge", _markdown(figures))
    return MergeProof(
        key=work.key,
        directory=work.directory,
        seconds=time.perf_counter() - began,
        model=ModelRef(path=str(work.directory / "model"), sha256=figures.sha256),
        **figures.model_dump(),
    )


def _markdown(figures: MergeFigures) -> str:
    rows = [
        ["held-out prompts", str(figures.prompts)],
        ["largest difference of a token's log-probability, merged in float32", f"{figures.merge_difference:.2g} nats"],
        [
            "mean difference per token, saved and reloaded",
            f"{figures.mean_logprob_difference:.2g} nats (limit {figures.tolerance})",
        ],
        ["identical greedy tokens", f"{figures.greedy_agreement:.1%}"],
        ["size", f"{figures.size_bytes / 2**20:.1f} MiB"],
        ["SHA-256", code(figures.sha256)],
    ]
    intro = "The merged model is compared with base + adapter on greedy completions of held-out prompts."
    return f"# Merge\n\n{intro}\n\n" + table(["proof", "value"], rows, right=["value"]) + "\n"
