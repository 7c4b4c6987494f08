"""Step: merge the last stage's adapter into the base model, and prove that the merged model is the same policy."""

from typing import Any

from grpo_tasks.content.markdown import code, table
from grpo_tasks.data.table import read_chats
from grpo_tasks.environments.offered import offering
from grpo_tasks.policy.merge_proof import PROOF_PROMPTS, merge_and_prove
from grpo_tasks.running.step import Work, step
from schemas.config.learning.interaction import InteractionConfig
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.results.data import DataReport
from schemas.results.model import PROOF_TOKENS, MergeProof, MergeSpec, ModelRef


@step(rooms=("policy", "attention", "data", "environments"), retries=1, device=True)
def merge_adapter(
    work: Work,
    ref: ModelRef,
    data: DataReport,
    *,
    model: ModelConfig,
    chat_template_kwargs: dict[str, Any],
    interaction: InteractionConfig,
    system_prompt: str | None,
) -> MergeProof:
    """Merge in float32, save, reload and compare. A merged model that differs raises an error and is never published."""
    if interaction.active:
        # Imports transformers, which this process does without otherwise.
        from grpo_tasks.data.chat_tokens import load_counter

        # The merged model answers to the prompts of its training, which showed the tools.
        rollout = RolloutConfig(chat_template_kwargs=chat_template_kwargs)
        template = load_counter(model).tokenizer.chat_template
        chat_template_kwargs = offering(interaction, rollout, template).chat_template_kwargs
    spec = MergeSpec(
        model=model,
        ref=ref,
        prompts=read_chats(data.eval, limit=PROOF_PROMPTS),
        max_new_tokens=PROOF_TOKENS,
        chat_template_kwargs=chat_template_kwargs,
        system_prompt=system_prompt,
    )
    proof = merge_and_prove(spec, work.directory, key=work.key)
    work.artifact("merge", _markdown(proof))
    return proof


def _markdown(proof: MergeProof) -> str:
    rows = [
        ["held-out prompts", str(proof.prompts)],
        ["largest difference of a token's log-probability, merged in float32", f"{proof.merge_difference:.2g} nats"],
        [
            "mean difference per token, saved and reloaded",
            f"{proof.mean_logprob_difference:.2g} nats (limit {proof.tolerance})",
        ],
        ["identical greedy tokens", f"{proof.greedy_agreement:.1%}"],
        ["size", f"{proof.size_bytes / 2**20:.1f} MiB"],
        ["SHA-256", code(proof.sha256)],
    ]
    intro = "The merged model is compared with base + adapter on greedy completions of held-out prompts."
    return f"# Merge\n\n{intro}\n\n" + table(["proof", "value"], rows, right=["value"]) + "\n"
