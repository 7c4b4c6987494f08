"""What each precision keeps of a training, and what `merged_dtype: auto` takes, after ten trainings.

    python -m tests.benchmarks.merging                    the demo's model in bfloat16 (about four minutes on one core)
    python -m tests.benchmarks.merging CONFIG.yaml        the model and the data of a config; `--only 1e-4x3` for one run

Each run trains a stage of the config with its own learning rate and number of updates, without warm-up, and merges it. Every
precision is then measured as the proof measures it: the share of what the policy changed that the rounded model keeps, and the
same of the weights. Prints a table in Markdown.
"""

import gc
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path

import torch

from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.data.table import read_chats
from grpo_tasks.library import load_data, merge, train_stage
from grpo_tasks.policy.change import distance, kept, record_completions, weight_shares
from grpo_tasks.policy.load import load_policy, load_tokenizer
from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.results.data import DataReport
from schemas.results.model import PROOF_PROMPTS, PROOF_TOKENS, ModelRef

RUNS = (
    (1e-6, 1), (1e-6, 10), (1e-6, 50), (5e-6, 20), (1e-5, 3), (1e-5, 50), (1e-4, 3), (1e-4, 20), (1e-3, 3), (1e-3, 50),
)  # fmt: skip
"""Learning rate and updates."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HEADINGS = ("learning rate", "updates", "KL from the base, nats per token", *DTYPES, "greedy tokens that agree", "auto")


def measured(config: RunConfig, model: ModelRef, data: DataReport) -> tuple[float, dict[str, str], float]:
    """KL of base and policy; what each precision keeps of the policy and of the weights; greedy agreement of the base."""
    cpu = torch.device("cpu")
    tokenizer = load_tokenizer(model, config.model, config.rollout.chat_template_kwargs)
    prompts = [prompt_ids(tokenizer, list(chat)) for chat in read_chats(data.eval, limit=PROOF_PROMPTS)]
    policy = load_policy(model, config.model, device=cpu, dtype="float32")
    said = record_completions(policy, tokenizer, prompts, PROOF_TOKENS)
    with policy.disable_adapter():
        base = distance(policy, said)
    shares, found = weight_shares(policy, None, list(DTYPES.values())), {}
    for name, dtype in DTYPES.items():
        rounded = load_policy(model, config.model, device=cpu, dtype="float32").merge_and_unload()
        for parameter in rounded.parameters():
            parameter.data = parameter.data.to(dtype).float()
        form = distance(rounded, said)
        found[name] = (
            f"{kept(form, base):.1%}, {shares[dtype].total:.1%}" if kept(form, base) > 0 else f"none, {shares[dtype].total:.1%}"
        )
        del rounded
        gc.collect()
    return base.kl, found, base.agreement


def main() -> None:
    """Train, merge, measure and print."""
    parser = ArgumentParser()
    parser.add_argument("config", nargs="?", default="demo")
    parser.add_argument("--only", default="", help="one run, as LEARNING_RATExUPDATES")
    asked = parser.parse_args()
    precision = ["model.dtype=bfloat16"] if asked.config == "demo" else []
    config = load_config(asked.config, precision)
    stage = config.stages[-1]
    only = [part.split("x") for part in asked.only.split(",") if part]
    runs = [(float(rate), int(updates)) for rate, updates in only] or RUNS
    print("| " + " | ".join(HEADINGS) + " |\n|" + "---:|" * (len(HEADINGS) - 1) + "---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = load_data(config, folder / "data")
        for index, (rate, updates) in enumerate(runs):
            own = {"learning_rate": rate, "max_steps": updates, "warmup_steps": 0, "save_steps": updates}
            trained = train_stage(config, stage.model_copy(update=own), data, folder / f"stage-{index}")
            proof = merge(config, trained.model, data, folder / f"merge-{index}")
            kl, found, agreement = measured(config, trained.model, data)
            agreed = f"base {agreement:.1%}, merged {proof.greedy_agreement:.1%}"
            cells = [f"{rate:g}", str(updates), f"{kl:.2g}", *found.values(), agreed, proof.dtype]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
