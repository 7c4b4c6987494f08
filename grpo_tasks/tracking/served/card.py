"""The model card of a version, which MLflow shows as its description: purpose, data, figures, limits, licence of the base.

A card is replaced when the decision changes, and never where a person wrote another text. What this module does not do: measure
or decide anything. It writes down what a run knows already.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from mlflow import MlflowClient

from grpo_tasks.content.markdown import code, table
from schemas.config.run import RunConfig
from schemas.metrics import describe_figure
from schemas.paths import EMBEDDED, resolve
from schemas.results.data import DataReport
from schemas.results.evaluation import EvalReport, PairedTest
from schemas.results.model import MergeProof

_LONGEST = 2_000
"""Characters of a system prompt that the card shows."""
_LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")
_HEAD_CHARS = 20_000
CARD_TAG = "grpo.card"
"""Tag of a version: marks of the cards that it had. A description with another mark was written by a person."""
_BEFORE_DECISION, _AFTER_DECISION = "(reinforcement learning from rewards) and merged. ", "\n\n## Trained for"
_NOT_PROMOTED = "Not promoted"


def model_card(
    config: RunConfig,
    proof: MergeProof,
    evaluation: EvalReport,
    *,
    tests: Sequence[PairedTest],
    data: DataReport | None,
    decision: str,
) -> str:
    """Markdown without a headline.

    Args:
        config: of the run that trained the model.
        proof: of the merge.
        evaluation: of the merged model.
        tests: against the base, and the champion if there was one.
        data: of the run; None where the run has not read it.
        decision: why the alias `champion` moved, or did not.
    """
    base = config.model.path + (f" at revision {config.model.revision}" if config.model.revision else "")
    opening = f"Base model {code(base)}, trained with GRPO {_BEFORE_DECISION}{_sentence(decision)}"
    sections = [
        f"{opening}{_AFTER_DECISION}\n\n{_purpose(config)}",
        "## Data\n\n" + _data(config, data),
        "## Figures\n\n" + _figures(evaluation, tests),
        "## Limits\n\n" + _limits(config, proof, evaluation),
        f"## Licence of the base\n\n{licence(config.model.path)}",
        "## Use\n\n" + _use(config, proof),
    ]
    return "\n\n".join(sections) + "\n"


def decision_text(promoted: bool, reason: str) -> str:
    """The decision as a card says it."""
    return f"{'Promoted' if promoted else _NOT_PROMOTED}: {reason}"


def says_not_promoted(description: str | None) -> bool:
    """Whether the card of a version says that it was not promoted."""
    return (description or "").partition(_BEFORE_DECISION)[2].startswith(_NOT_PROMOTED)


def write_card(client: MlflowClient, name: str, version: str, card: str) -> None:
    """Make the card the description of a version, unless a person wrote the present one. Can be repeated."""
    found = client.get_model_version(name, version)
    present, marks = found.description or "", found.tags.get(CARD_TAG, "").split()
    if present == card and _mark(card) in marks:
        return
    if present not in ("", card) and _mark(present) not in marks:
        return
    # Both marks, and the tag first: a kill before the next call leaves the present text known as a card.
    client.set_model_version_tag(name, version, CARD_TAG, " ".join(dict.fromkeys([_mark(card), _mark(present)])))
    client.update_model_version(name, version, card)


def restate_decision(client: MlflowClient, name: str, version: str, decision: str) -> None:
    """Replace the decision in the card of a version, unless a person wrote another text."""
    before, said, rest = (client.get_model_version(name, version).description or "").partition(_BEFORE_DECISION)
    _, section, after = rest.partition(_AFTER_DECISION)
    if said and section:
        write_card(client, name, version, f"{before}{said}{_sentence(decision)}{section}{after}")


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "." if text else ""


def _purpose(config: RunConfig) -> str:
    stages = [
        [stage.name, ", ".join(stage.rewards), str(stage.max_steps), f"{stage.learning_rate:g}", str(stage.num_generations)]
        for stage in config.stages
    ]
    prompt = config.data.system_prompt
    carried = "The chat template adds it to conversations without a system message."
    brought = "Conversations must bring it themselves."
    said = (
        "There is no system prompt."
        if prompt is None
        else f"System prompt: {code(prompt[:_LONGEST])}. {carried if config.model.merged_system_prompt else brought}"
    )
    return said + "\n\n" + table(["stage", "rewards", "updates at most", "learning rate", "group size"], stages)


def _data(config: RunConfig, data: DataReport | None) -> str:
    sources = ", ".join(str(code(source.path)) for source in config.data.train)
    if data is None:
        return f"Sources: {sources}."
    held_out = f"{data.eval_rows:,} more were held out for the evaluation"
    rejected = f"; {data.quarantined:,} of {data.rows:,} rows were rejected" if data.quarantined else ""
    return f"{data.train_rows:,} prompts from {sources}; {held_out}{rejected}. Digest: {code(data.digest)}."


def _figures(evaluation: EvalReport, tests: Sequence[PairedTest]) -> str:
    level = f"{evaluation.confidence:.0%} interval"
    rows = [
        [name, f"{found.value:.4g}", f"{found.low:.4g} to {found.high:.4g}", _meaning(name)]
        for name, found in evaluation.metrics.items()
    ]
    samples = f"{evaluation.num_samples} samples each at temperature {evaluation.temperature:g}"
    about = f"{evaluation.prompts:,} held-out prompts, {samples}."
    compared = [
        f"- against the {test.against}: {test.metric} {test.difference:+.4f} over {test.prompts:,} prompts, "
        f"p = {test.p_value:.3g}"
        for test in tests
    ]
    return "\n\n".join([about, table(["metric", "value", level, "meaning"], rows, right=["value"]), "\n".join(compared)]).rstrip()


def _meaning(name: str) -> str:
    known = describe_figure(name)
    return known.meaning if known else ""


def _limits(config: RunConfig, proof: MergeProof, evaluation: EvalReport) -> str:
    return "\n".join(
        [
            f"- Measured on {evaluation.prompts:,} held-out prompts of the same kind as the training data, and on nothing else. "
            "Other abilities of the base may have changed.",
            f"- Trained with prompts of up to {config.validation.max_prompt_length:,} tokens and completions of up to "
            f"{config.rollout.max_completion_length:,}.",
            f"- Saved in {proof.choice()}. Merging and rounding change the log-probability of a token by "
            f"{proof.mean_logprob_difference:.2g} nats on average, training changed it by {proof.base_logprob_difference:.2g}.",
            *_served_as(proof),
            "- Rewards are a proxy: a model can learn to please them instead of doing the task.",
        ]
    )


def _served_as(proof: MergeProof) -> list[str]:
    """What a server must know that would round the weights once more."""
    if proof.dtype == "bfloat16":
        return []
    flag = "" if proof.dtype == "float16" else " vLLM serves such a model in 16 bits unless it is started with `--dtype float32`."
    return [f"- A server that loads it in bfloat16 loses part of what it learned.{flag}"]


def licence(path: str) -> str:
    """What is known about the licence of a base model, without asking the network."""
    if path.startswith(EMBEDDED):
        return "The embedded model ships with this project, under the project's licence."
    folder = Path(resolve(path))
    if not folder.is_dir():
        return f"See https://huggingface.co/{path}."
    declared = _front_matter(folder / "README.md").get("license")
    if declared:
        return f"Declared in its README.md: {code(declared)}."
    named = next((name for name in _LICENCE_FILES if (folder / name).is_file()), None)
    return f"See {named} in its folder." if named else "Unknown: its folder names none. Find it out before you pass the model on."


def _front_matter(readme: Path) -> dict[str, str]:
    """The lines `name: value` between the `---` at the beginning of a file; a hub model declares its licence there."""
    if not readme.is_file():
        return {}
    with readme.open(encoding="utf-8", errors="replace") as file:
        head = file.read(_HEAD_CHARS).split("\n---", 1)[0]
    if not head.startswith("---\n"):
        return {}
    pairs = (line.partition(":") for line in head.splitlines())
    return {name: value.strip() for name, _, value in pairs if value.strip()}


def _use(config: RunConfig, proof: MergeProof) -> str:
    name, uri = config.registered_model, f"models:/{config.registered_model}@champion"
    adapter = (
        [
            f"grpo export {name}@champion DIR    # the adapter alone, in float32, for peft and vLLM over the base",
            "```",
            "",
            "The adapter that was merged is in `adapter/`, next to `model/` in the artifacts.",
        ]
        if proof.policy.adapter is not None
        else ["```"]
    )
    return "\n".join(
        [
            "```",
            f"mlflow models serve -m {uri} --env-manager local",
            "curl http://127.0.0.1:5000/invocations -H 'Content-Type: application/json' \\",
            """  -d '{"messages": [{"role": "user", "content": "..."}]}'""",
            f"grpo download {name}@champion DIR    # a folder for transformers and vLLM",
            *adapter,
        ]
    )
