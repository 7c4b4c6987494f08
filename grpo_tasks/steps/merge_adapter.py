"""Step: merge the last stage's adapter into the base model, in a child process, and prove that it is the same policy.

On the CPU, so it waits for no slot of a GPU (grpo_tasks/policy/__main__.py).
"""

import time

from grpo_tasks.content.markdown import as_markdown
from grpo_tasks.data.offered_tools import with_offered_tools
from grpo_tasks.data.table import read_chats
from grpo_tasks.processes.child import RESULT, SPEC, run_module
from grpo_tasks.running.step import Work, step
from schemas.config.operations import ResourcesConfig
from schemas.config.run import RunConfig
from schemas.results.data import DataReport
from schemas.results.model import PROOF_PROMPTS, PROOF_TOKENS, MergeFigures, MergeProof, MergeSpec, ModelRef, Sampling


@step(
    reads="model data.system_prompt interaction rollout.chat_template_kwargs "
    + " ".join(f"rollout.{name}" for name in Sampling.model_fields),
    retries=1,
)
def merge_adapter(work: Work, config: RunConfig, ref: ModelRef, data: DataReport) -> MergeProof:
    """Merge in float32, save, reload and compare. A merged model that keeps too little of what training changed raises an error
    and is never published."""
    began = time.perf_counter()
    merge_spec(config, ref, data, work.run.resources).save(work.directory / SPEC)
    run_module("grpo_tasks.policy", work.directory)
    figures = MergeFigures.load(work.directory / RESULT)
    proof = MergeProof(
        key=work.key,
        directory=work.directory,
        seconds=time.perf_counter() - began,
        model=ModelRef(path=str(work.directory / "model"), sha256=figures.sha256),
        policy=ref,
        **figures.model_dump(),
    )
    work.artifact("merge", "# Merge\n\n" + as_markdown(proof.sections()))
    return proof


def merge_spec(config: RunConfig, ref: ModelRef, data: DataReport, resources: ResourcesConfig) -> MergeSpec:
    """What the child process is to merge and to prove."""
    return MergeSpec(
        model=config.model,
        ref=ref,
        prompts=read_chats(data.eval, limit=PROOF_PROMPTS),
        max_new_tokens=PROOF_TOKENS,
        # The merged model answers to the prompts of its training, which showed the tools.
        chat_template_kwargs=with_offered_tools(config).rollout.chat_template_kwargs,
        system_prompt=config.merged_system_prompt,
        sampling=Sampling.of(config.rollout),
        num_threads=resources.num_threads,
    )
