"""Step: merge the last stage's adapter into the base model, and prove that the merged model is the same policy."""

from grpo_tasks.content.markdown import as_markdown
from grpo_tasks.data.offered_tools import with_offered_tools
from grpo_tasks.data.table import read_chats
from grpo_tasks.policy.merge_proof import PROOF_PROMPTS, merge_and_prove
from grpo_tasks.running.step import Work, step
from schemas.config.run import RunConfig
from schemas.results.data import DataReport
from schemas.results.model import PROOF_TOKENS, MergeProof, MergeSpec, ModelRef, Sampling


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
    work.artifact("merge", "# Merge\n\n" + as_markdown(proof.sections()))
    return proof
