"""Step: merge the last stage's adapter into the base model, and prove that the merged model is the same policy."""

from grpo_tasks.content.markdown import code, table
from grpo_tasks.data.offered_tools import with_offered_tools
from grpo_tasks.data.table import read_chats
from grpo_tasks.policy.merge_proof import PROOF_PROMPTS, merge_and_prove
from grpo_tasks.running.step import Work, step
from schemas.config.run import RunConfig
from schemas.results.data import DataReport
from schemas.results.model import PROOF_TOKENS, MergeProof, MergeSpec, ModelRef, Sampling, percent


@step(
    reads="model data.system_prompt interaction rollout.chat_template_kwargs "
    + " ".join(f"rollout.{name}" for name in Sampling.model_fields),
    retries=1,
    device=True,
)
def merge_adapter(work: Work, config: RunConfig, ref: ModelRef, data: DataReport) -> MergeProof:
    """Merge in float32, save, reload and compare. A merged model that keeps too little of what training changed raises an error
    and is never published."""
    spec = MergeSpec(
        model=config.model,
        ref=ref,
        prompts=read_chats(data.eval, limit=PROOF_PROMPTS),
        max_new_tokens=PROOF_TOKENS,
        # The merged model answers to the prompts of its training, which showed the tools.
        chat_template_kwargs=with_offered_tools(config).rollout.chat_template_kwargs,
        system_prompt=config.merged_system_prompt,
        sampling=Sampling.of(config.rollout),
    )
    proof = merge_and_prove(spec, work.directory, key=work.key)
    work.artifact("merge", _markdown(proof))
    return proof


def _markdown(proof: MergeProof) -> str:
    rows = [
        ["KL divergence, nats per token", f"{proof.base_kl:.3g}", f"{proof.merged_kl:.3g}"],
        [
            f"difference of a token's log-probability, nats (limit {proof.tolerance:g})",
            f"{proof.base_logprob_difference:.2g}",
            f"{proof.mean_logprob_difference:.2g}",
        ],
        ["identical greedy tokens", f"{proof.base_greedy_agreement:.1%}", f"{proof.greedy_agreement:.1%}"],
    ]
    tried = [[one.dtype, percent(one.kept_weights), one.reason] for one in proof.refused]
    tried.append([proof.dtype, percent(proof.kept_weights), f"taken: it keeps {percent(proof.kept)} of what the policy changed"])
    sections = [
        "# Merge",
        f"Saved in {proof.choice()}.",
        f"Base and merged model are compared with base + adapter, on a likeliest and a sampled completion of {proof.prompts} "
        "held-out prompts.",
        table(["distance from base + adapter", "base", "merged model"], rows, right=["base", "merged model"]),
        table(["precision", "change of the weights kept", "result"], tried, right=["change of the weights kept"]),
        f"Before rounding, a token's log-probability differs by at most {proof.merge_difference:.2g} nats. Size "
        f"{proof.size_bytes / 2**20:.1f} MiB, SHA-256 {code(proof.sha256)}.",
    ]
    return "\n\n".join(sections) + "\n"
